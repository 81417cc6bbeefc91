"""Placement of experts, by values and over all subsets and sequences of members."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfloor.experts.placement import (
    ExpertPlacement,
    Transfer,
    canonical,
    rehome,
    repaired,
    to_restore,
    transfers,
)
from flexfloor.model_memory import max_experts_per_rank


def check_change(old: ExpertPlacement, new: ExpertPlacement) -> None:
    """What holds for every change: all experts served, no serving slot overwritten, every weight arrives."""
    new.validate()
    for move in transfers(old, new):
        assert old.experts_on(move.source)[move.source_slot] == move.expert
        assert new.experts_on(move.target)[move.target_slot] == move.expert
        if move.target in old.members:
            before = old.experts_on(move.target)
            assert move.target_slot >= len(before) or before[move.target_slot] is None
    assert _after_transfers(old, new) == dict(new.slots)


def _after_transfers(old: ExpertPlacement, new: ExpertPlacement) -> dict[int, tuple[int | None, ...]]:
    """What lies on the new members when exactly the transfers were made, read through the new maps."""
    arrived = {(move.target, move.target_slot): move.expert for move in transfers(old, new)}
    held = {
        (rank, slot): expert for rank, experts in old.slots for slot, expert in enumerate(experts)
    } | arrived
    return {
        rank: tuple(None if expert is None else held[rank, slot] for slot, expert in enumerate(experts))
        for rank, experts in new.slots
    }


def counts(placement: ExpertPlacement) -> list[int]:
    return [placement.num_experts_on(rank) for rank in placement.members]


def all_subsets(ep_size: int) -> list[tuple[int, ...]]:
    return [chosen for size in range(1, ep_size + 1) for chosen in combinations(range(ep_size), size)]


def test_the_full_group_has_contiguous_blocks() -> None:
    full = canonical(8, 4)
    assert full.slots == ((0, (0, 1)), (1, (2, 3)), (2, (4, 5)), (3, (6, 7)))
    assert full.members == (0, 1, 2, 3)
    assert full.holder(5) == 2
    assert full.slot_map(2) == (-1, -1, -1, -1, 0, 1, -1, -1)
    full.validate()


def test_orphans_go_to_further_slots_and_stay_there() -> None:
    three = rehome(canonical(8, 4), (0, 1, 3))
    assert three.slots == ((0, (0, 1, 4)), (1, (2, 3, 5)), (3, (6, 7)))
    two = rehome(three, (0, 1))
    assert two.slots == ((0, (0, 1, 4, 6)), (1, (2, 3, 5, 7)))
    assert two.slot_map(1) == (-1, -1, 0, 1, -1, 2, -1, 3)


def test_a_slot_in_the_middle_is_free_when_its_owner_is_back() -> None:
    two = rehome(rehome(canonical(8, 4), (0, 1, 3)), (0, 1))
    three = rehome(two, (0, 1, 2))
    assert three.slots == ((0, (0, 1, None, 6)), (1, (2, 3, None, 7)), (2, (4, 5)))
    assert rehome(three, (0, 2)).slots == ((0, (0, 1, 3, 6)), (2, (4, 5, 2, 7)))


def test_transfers_of_a_shrink_start_at_the_leaver() -> None:
    full = canonical(8, 4)
    assert transfers(full, rehome(full, (0, 1, 3))) == (
        Transfer(expert=4, source=2, target=0, source_slot=0, target_slot=2),
        Transfer(expert=5, source=2, target=1, source_slot=1, target_slot=2),
    )


def test_a_returning_rank_receives_its_block() -> None:
    one = rehome(canonical(4, 2), (1,))
    assert one.slots == ((1, (2, 3, 0, 1)),)
    back = rehome(one, (0, 1))
    assert back == canonical(4, 2)
    assert transfers(one, back) == (
        Transfer(expert=0, source=1, target=0, source_slot=2, target_slot=0),
        Transfer(expert=1, source=1, target=0, source_slot=3, target_slot=1),
    )


def test_surplus_orphans_move_to_the_rank_that_came_back() -> None:
    one = rehome(canonical(8, 4), (0,))
    two = rehome(one, (0, 3))
    assert two.slots == ((0, (0, 1, 2, 3)), (3, (6, 7, 5, 4)))


def test_measured_load_is_evened_out_under_the_same_count() -> None:
    load = [0.0, 0.0, 0.3, 0.3, 0.3, 0.1, 0.0, 0.0]
    # Expert 4 weighs most and goes to the idle rank 0; then rank 3 is the least loaded.
    placement = rehome(canonical(8, 4), (0, 1, 3), load=load)
    assert placement.slots == ((0, (0, 1, 4)), (1, (2, 3)), (3, (6, 7, 5)))
    assert counts(rehome(canonical(8, 4), (0, 1), load=[1, 1, 0, 0, 0, 0, 0, 0])) == [4, 4]


@pytest.mark.parametrize("ep_size", [1, 2, 4, 6])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_every_subset_of_the_full_group_is_even(ep_size: int, block_size: int) -> None:
    full = canonical(ep_size * block_size, ep_size)
    for members in all_subsets(ep_size):
        placement = rehome(full, members)
        check_change(full, placement)
        assert placement.members == members
        assert max(counts(placement)) <= max_experts_per_rank(full.num_experts, len(members))
        # No free slot is needed when ranks only leave.
        assert all(None not in experts for _, experts in placement.slots)


@st.composite
def histories(draw: st.DrawFn, *, one_way: bool) -> list[ExpertPlacement]:
    """Successive placements; `one_way`: in each change ranks only leave or only join."""
    ep_size, block_size = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    placements = [canonical(ep_size * block_size, ep_size)]
    shares = st.lists(st.floats(0, 1), min_size=ep_size * block_size, max_size=ep_size * block_size)
    for chosen in draw(st.lists(st.sets(st.integers(0, ep_size - 1), min_size=1), max_size=12)):
        before = set(placements[-1].members)
        members = chosen
        if one_way:
            members = (before & chosen) or (before | chosen)
        placements.append(rehome(placements[-1], members, load=draw(st.none() | shares)))
    return placements


@given(placements=histories(one_way=False))
def test_any_sequence_of_members_serves_every_expert(placements: list[ExpertPlacement]) -> None:
    for old, new in pairwise(placements):
        check_change(old, new)
    full = rehome(placements[-1], range(placements[0].ep_size))
    check_change(placements[-1], full)
    assert full == placements[0]


@given(placements=histories(one_way=True))
def test_slots_stay_within_those_of_the_smallest_group_so_far(placements: list[ExpertPlacement]) -> None:
    smallest = placements[0].ep_size
    for old, new in pairwise(placements):
        check_change(old, new)
        smallest = min(smallest, len(new.members))
        num_slots = max_experts_per_rank(new.num_experts, smallest)
        assert all(len(experts) <= num_slots for _, experts in new.slots)
        if set(new.members) <= set(old.members):
            assert not {move.target for move in transfers(old, new)} - set(old.members)


@given(placements=histories(one_way=True))
def test_a_member_has_more_than_its_share_only_where_it_had_it_before(
    placements: list[ExpertPlacement],
) -> None:
    for old, new in pairwise(placements):
        most = max_experts_per_rank(new.num_experts, len(new.members))
        for rank in new.members:
            before = old.num_experts_on(rank) if rank in old.members else 0
            assert new.num_experts_on(rank) <= max(most, before)


@given(placements=histories(one_way=False))
def test_orphans_stay_while_their_holder_is_not_over_full(placements: list[ExpertPlacement]) -> None:
    for old, new in pairwise(placements):
        for expert in range(old.num_experts):
            rank = old.holder(expert)
            owner = expert // old.block_size
            if rank in new.members and rank != owner and owner not in new.members:
                most = max_experts_per_rank(new.num_experts, len(new.members))
                stays = new.slot_map(rank)[expert] == old.slot_map(rank)[expert]
                assert stays or old.num_experts_on(rank) > most


def test_rehoming_is_deterministic_and_ignores_the_order_of_members() -> None:
    full = canonical(12, 6)
    assert rehome(full, [4, 0, 2]) == rehome(full, {0, 2, 4}) == rehome(full, (0, 2, 4))


@pytest.mark.parametrize(
    ("members", "text"),
    [((), "members=\\[\\]"), ((0, 4), "below ep_size=4"), ((-1,), "members=\\[-1\\]"), ((1, 1), "different")],
)
def test_members_that_cannot_be_are_refused(members: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        rehome(canonical(8, 4), members)


def test_sizes_and_loads_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="ep_size=3 does not divide num_experts=8"):
        canonical(8, 3)
    with pytest.raises(ValueError, match="3 shares for 8 experts"):
        rehome(canonical(8, 4), (0,), load=[1, 1, 1])
    with pytest.raises(ValueError, match="finite share"):
        rehome(canonical(2, 2), (0,), load=[1, float("nan")])
    with pytest.raises(ValueError, match="ep_rank 2 is no member"):
        rehome(canonical(8, 4), (0, 1)).experts_on(2)


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        (((0, (0, 1)),), r"\[2, 3\] have none"),
        (((0, (0, 1, 2)), (1, (2, 3))), r"\[2\] have more"),
        (((0, (1, 0)), (1, (2, 3))), "without its canonical block"),
        (((0, (0, 1)), (1, (2, 3, None))), "ends with a free slot"),
        (((1, (2, 3)), (0, (0, 1))), "not in order"),
        (((0, (0, 1)), (1, (2, 3, 4))), "the highest is 4"),
        (((0, (0, 1)), (2, (2, 3))), "below ep_size=2"),
    ],
)
def test_validate_names_what_is_wrong(slots: tuple, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ExpertPlacement(4, 2, slots).validate()


def test_after_a_loss_first_holder_wins_and_orphans_go_to_the_least_loaded() -> None:
    # Rank 2 died while rank 3 left: rank 0 had switched and holds 6, rank 1 had not.
    held = {0: (0, 1, 6), 1: (2, 3), 3: (6, 7)}
    assert dict(repaired(8, 4, held, (0, 1)).slots) == {0: (0, 1, 6, 5), 1: (2, 3, 4, 7)}
    # Who is a member holds its own block, whoever else has a copy.
    assert dict(repaired(8, 4, held, (0, 1, 3)).slots) == {0: (0, 1, 4), 1: (2, 3, 5), 3: (6, 7)}
    # Of two holders of an orphan the first one keeps it.
    held = {0: (0, 1, None, 4), 1: (2, 3, 4, 5)}
    assert dict(repaired(8, 4, held, (0, 1)).slots) == {0: (0, 1, 6, 4), 1: (2, 3, 7, 5)}


def test_what_a_rank_lacks_after_a_loss() -> None:
    assert to_restore((0, 1, 6), (0, 1, 6, 5)) == ((3, 5),)
    assert to_restore((), (2, 3, None, 7)) == ((0, 2), (1, 3), (3, 7))
    assert to_restore((2, None, 5), (2, 3, 4)) == ((1, 3), (2, 4))


@given(data=st.data())
def test_whatever_the_survivors_say_every_expert_is_served(data) -> None:
    ep_size, block_size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    num_experts = ep_size * block_size
    members = data.draw(st.sets(st.integers(0, ep_size - 1), min_size=1))
    slots = st.lists(st.one_of(st.none(), st.integers(-1, num_experts)), max_size=num_experts)
    held = data.draw(st.dictionaries(st.integers(0, ep_size - 1), slots))
    found = repaired(num_experts, ep_size, held, members)
    found.validate()
    assert found.members == tuple(sorted(members))
    for rank in members:
        wanted = found.experts_on(rank)
        after = list(held.get(rank, ())) + [None] * num_experts
        for slot, expert in to_restore(held.get(rank, ()), wanted):
            after[slot] = expert
        assert all(expert is None or after[slot] == expert for slot, expert in enumerate(wanted))


@given(data=st.data())
def test_a_placement_in_force_survives_a_loss_with_the_fewest_restored(data) -> None:
    ep_size, block_size = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3))
    before = canonical(ep_size * block_size, ep_size)
    members = data.draw(st.sets(st.integers(0, ep_size - 1), min_size=2))
    before = rehome(before, members)
    left = members - {data.draw(st.sampled_from(sorted(members)))}
    after = repaired(before.num_experts, ep_size, dict(before.slots), left)
    after.validate()
    lost = {expert for rank in members - left for expert in before.experts_on(rank) if expert is not None}
    restored = [
        expert for rank in left for _, expert in to_restore(before.experts_on(rank), after.experts_on(rank))
    ]
    assert sorted(restored) == sorted(lost)
    assert max(counts(after)) <= max(*counts(before), max_experts_per_rank(before.num_experts, len(left)))
