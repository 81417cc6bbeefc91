"""Placement policies, by values and by property."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfloor.scheduling.place import (
    Chunked,
    LeastInflight,
    Planned,
    RoundRobin,
    running_limit_per_rank,
)


def test_round_robin_goes_in_arrival_order_whatever_finishes() -> None:
    policy = RoundRobin(3)
    assert [policy.submit(name) for name in "abcd"] == [0, 1, 2, 0]
    policy.finish("b")
    policy.finish("c")
    assert [policy.submit(name) for name in "ef"] == [1, 2]
    assert policy.inflight == (2, 1, 1)


def test_least_inflight_takes_the_emptiest_and_lowest_rank() -> None:
    policy = LeastInflight(3)
    assert [policy.submit(name) for name in "abcd"] == [0, 1, 2, 0]
    policy.finish("c")
    policy.finish("b")
    assert [policy.submit(name) for name in "efg"] == [1, 2, 1]


def test_least_inflight_holds_back_beyond_the_running_limit() -> None:
    policy = LeastInflight(2, running_limit=1)
    assert [policy.submit(name) for name in "ab"] == [0, 1]
    assert policy.submit("c") is None
    policy.finish("b")
    assert policy.submit("c") == 1
    assert policy.submit("d") is None
    assert policy.inflight == (1, 1)


@pytest.mark.parametrize("policy", [RoundRobin(2), LeastInflight(2)])
def test_a_response_is_on_one_rank_at_a_time(policy: RoundRobin | LeastInflight) -> None:
    policy.submit("a")
    with pytest.raises(ValueError, match="a is already on dp_rank 0"):
        policy.submit("a")
    policy.finish("a")
    with pytest.raises(ValueError, match="a finished, but it is on no rank"):
        policy.finish("a")


def test_groups_have_a_rank_and_ranks_run_something() -> None:
    with pytest.raises(ValueError, match="num_ranks=0"):
        RoundRobin(0)
    with pytest.raises(ValueError, match="running_limit=0"):
        LeastInflight(2, 0)


def test_running_limit_is_divided_and_rounded_down_but_never_zero() -> None:
    assert [running_limit_per_rank(256, n) for n in (8, 3, 300)] == [32, 85, 1]


def test_chunks_are_contiguous_and_equal_to_within_one() -> None:
    policy = Chunked("abcdefgh", 3)
    assert [policy.submit(name) for name in "abcdefgh"] == [0, 0, 0, 1, 1, 1, 2, 2]
    # A continued response stays with its chunk.
    policy.finish("d")
    assert policy.submit("d") == 1
    few = Chunked("ab", 4)
    assert [few.submit(name) for name in "ab"] == [0, 2]


def test_planned_goes_where_it_was_planned_and_nowhere_else() -> None:
    policy = Planned({"a": 2, "b": 0, "c": 2}, 3)
    assert [policy.submit(name) for name in "abc"] == [2, 0, 2]
    assert policy.inflight == (1, 0, 2)
    with pytest.raises(ValueError, match="response d is not one of the 3 planned ones"):
        policy.submit("d")
    with pytest.raises(ValueError, match="dp_rank=3: the group has ranks 0 to 2"):
        Planned({"a": 3}, 3)


def test_planned_takes_the_emptiest_member_when_its_rank_is_away() -> None:
    policy = Planned({"a": 2, "b": 0, "c": 2}, 3)
    policy.set_members((0, 1))
    assert [policy.submit(name) for name in "bac"] == [0, 1, 0]
    policy.set_members((0, 1, 2))
    policy.finish("a")
    assert policy.submit("a") == 2


def test_a_moved_response_goes_to_its_new_rank_and_stays_there() -> None:
    for policy in (RoundRobin(3), LeastInflight(3, 1), Planned({"a": 0, "b": 0}, 3)):
        assert policy.submit("a") == 0
        policy.move("a", 2)
        policy.finish("a")
        assert policy.submit("a") == 2
        policy.finish("a")
        assert policy.submit("a") == 2
        with pytest.raises(ValueError, match="dp_rank=3"):
            policy.move("a", 3)


def test_a_move_is_not_held_back_by_the_running_limit() -> None:
    policy = LeastInflight(2, 1)
    assert [policy.submit("a"), policy.submit("b"), policy.submit("c")] == [0, 1, None]
    policy.move("c", 1)
    assert policy.submit("c") == 1
    assert policy.inflight == (1, 2)


def test_only_members_take_responses_even_moved_ones() -> None:
    for policy in (RoundRobin(3), LeastInflight(3)):
        policy.set_members((1,))
        policy.move("a", 2)
        assert [policy.submit(name) for name in "abc"] == [1, 1, 1]
        with pytest.raises(ValueError, match="no members"):
            policy.set_members(())
        with pytest.raises(ValueError, match="dp_rank=3"):
            policy.set_members((3,))


def test_round_robin_goes_around_the_members() -> None:
    policy = RoundRobin(4)
    policy.set_members((0, 2, 3))
    assert [policy.submit(str(number)) for number in range(5)] == [0, 2, 3, 0, 2]
    policy.set_members((0, 1, 2, 3))
    assert [policy.submit(f"later {number}") for number in range(3)] == [3, 0, 1]


def test_least_inflight_holds_back_when_every_member_is_full() -> None:
    policy = LeastInflight(3, 1)
    policy.set_members((1,))
    assert [policy.submit("a"), policy.submit("b")] == [1, None]
    policy.set_members((1, 2))
    assert policy.submit("b") == 2


@given(num_ranks=st.integers(1, 9), num_responses=st.integers(0, 40))
def test_round_robin_is_even_for_any_sizes(num_ranks: int, num_responses: int) -> None:
    policy = RoundRobin(num_ranks)
    ranks = [policy.submit(str(i)) for i in range(num_responses)]
    counts = [ranks.count(rank) for rank in range(num_ranks)]
    assert max(counts) - min(counts) <= 1
    assert tuple(counts) == policy.inflight
    assert sum(counts) == num_responses


@given(num_ranks=st.integers(1, 5), limit=st.integers(1, 3) | st.none(), orders=st.lists(st.integers(0, 30)))
def test_least_inflight_places_each_once_within_its_limit(
    num_ranks: int, limit: int | None, orders: list[int]
) -> None:
    """Each order submits the next response, or finishes one of those that run."""
    policy, running, num_placed = LeastInflight(num_ranks, limit), {}, 0
    for order in orders:
        if order % 3 == 0 and running:
            name = sorted(running)[order % len(running)]
            del running[name]
            policy.finish(name)
        else:
            before = policy.inflight
            rank = policy.submit(str(num_placed))
            if rank is None:
                assert limit is not None
                assert min(before) == limit
                continue
            assert before[rank] == min(before)
            assert rank == before.index(min(before))
            running[str(num_placed)] = rank
            num_placed += 1
        assert policy.inflight == tuple(list(running.values()).count(r) for r in range(num_ranks))
        assert limit is None or max(policy.inflight) <= limit
