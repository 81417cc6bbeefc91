"""The cost-based release on hand-made states; whole courses of steps stand in test_release_courses."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.scheduling.clocks import GpuClock
from flexfloor.scheduling.cost import GroupLoad
from flexfloor.scheduling.decision import GroupView, ReleaseDecision, RunningResponse
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.release import (
    DRAINED,
    EAGER,
    GUARDED,
    MAX,
    AllowedSets,
    CostBasedRelease,
    ReleaseProfile,
)

CAP = 16_384
RUNAWAY = LengthPrediction(mean_log=1.0, sd_log=0.1, cap_share=1.0, cap_tokens=CAP)
"""Runs to the cap for certain, so the rest of the step is known."""


def _view(
    running: Mapping[int, Sequence[int]],
    *,
    num_ranks: int,
    members: Sequence[int] | None = None,
    at_s: float = 50.0,
) -> GroupView:
    """`running`: generated tokens of each response by rank; all of them run to the cap."""
    return GroupView(
        at_s=at_s,
        num_ranks=num_ranks,
        members=tuple(range(num_ranks)) if members is None else tuple(members),
        responses=tuple(
            tuple(
                RunningResponse(
                    response_id=f"{rank}/{index}",
                    prompt_tokens=100,
                    generated_tokens=generated,
                    prediction=RUNAWAY,
                )
                for index, generated in enumerate(running.get(rank, ()))
            )
            for rank in range(num_ranks)
        ),
    )


def _policy(
    num_ranks: int, *, floor: int = 1, profile: ReleaseProfile = GUARDED, **more: object
) -> CostBasedRelease:
    return CostBasedRelease(clock=GpuClock(), num_ranks=num_ranks, floor=floor, profile=profile, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("profile", [DRAINED, GUARDED, EAGER, MAX])
def test_two_drained_of_four_leave(profile: ReleaseProfile) -> None:
    decision = _policy(4, floor=2, profile=profile).decide(_view({0: [3000], 2: [3000]}, num_ranks=4))
    assert (decision.leavers, decision.moves) == ((1, 3), ())
    assert "4 members, 2 responses: to 2 members with 0 moves" in decision.reason
    assert decision.predicted_gain_s > 0
    rest_s = (CAP - 3000) * GpuClock().decode_s(
        GroupLoad(num_ranks=2, num_running=2, max_running=1, max_context_tokens=10_000)
    )
    assert decision.predicted_remaining_s == pytest.approx(rest_s, rel=0.05)


def test_the_floor_holds() -> None:
    decision = _policy(4, floor=3, profile=DRAINED).decide(_view({0: [3000], 2: [3000]}, num_ranks=4))
    assert decision.leavers == (3,)
    policy = _policy(4, floor=2)
    assert policy.decide(_view({0: [30]}, num_ranks=4, members=[0, 1])).reason == "2 members: the floor"


def test_nobody_leaves_when_the_step_is_over() -> None:
    assert _policy(4).decide(_view({}, num_ranks=4)).is_stay


def test_a_switch_that_costs_more_than_it_gains_is_not_made() -> None:
    decision = _policy(4, floor=2).decide(_view({0: [CAP - 8], 2: [CAP - 8]}, num_ranks=4))
    assert decision.is_stay
    assert "its stall weighs" in decision.reason


def test_survivors_must_have_room() -> None:
    view = _view({rank: [9000] for rank in range(4)}, num_ranks=4)

    def decide(pool: int) -> ReleaseDecision:
        return _policy(4, floor=2, profile=MAX, kv_tokens=lambda size: pool).decide(view)

    # Two responses that run to 16,484 tokens each.
    assert len(decide(40_000).leavers) == 2
    assert decide(30_000).is_stay
    assert "KV pools" in decide(15_000).reason


def test_drained_ranks_stay_where_the_smaller_pool_could_not_hold_the_longest() -> None:
    view = _view({0: [9000], 1: [9000]}, num_ranks=3)
    assert _policy(3, kv_tokens=lambda size: CAP, profile=DRAINED).decide(view).is_stay
    assert _policy(3, kv_tokens=lambda size: 2 * CAP, profile=DRAINED).decide(view).leavers == (2,)


def test_stragglers_move_and_the_rank_with_least_to_move_leaves() -> None:
    running = {0: [9000, 9000], 1: [9000], 2: [9000, 9000], 3: [9000, 9000]}
    decision = _policy(4, floor=3, profile=MAX).decide(_view(running, num_ranks=4))
    assert decision.leavers == (1,)
    assert [(move.response_id, move.source, move.target) for move in decision.moves] == [("1/0", 1, 0)]
    assert decision.predicted_stall_s > GpuClock().prefill_s(9100) + 0.3


def test_moved_responses_spread_over_the_survivors() -> None:
    running = {rank: [9000 + 100 * rank] for rank in range(8)}
    decision = _policy(8, floor=4, profile=MAX).decide(_view(running, num_ranks=8))
    assert len(decision.leavers) == len(decision.moves) == 4
    assert len({move.target for move in decision.moves}) == 4


def test_without_budget_moves_end_and_drained_ranks_still_leave() -> None:
    profile = ReleaseProfile(price=1.0, wall_budget=0.0)
    busy, drained = ({0: [2000], 1: [2000], 2: [2000], 3: [2000]}, {0: [2000], 1: [2000], 2: [2000]})
    stay = _policy(4, floor=3, profile=profile).decide(_view(busy, num_ranks=4))
    assert stay.is_stay
    assert "budget" in stay.reason
    assert not _policy(4, floor=3, profile=MAX).decide(_view(busy, num_ranks=4)).is_stay
    leaving = _policy(4, floor=3, profile=profile).decide(_view(drained, num_ranks=4))
    assert (leaving.leavers, leaving.moves) == ((3,), ())


def test_what_was_lost_counts_against_the_budget() -> None:
    """In the same state nothing moves where the step has run far longer than it would have in full."""

    def second(at_s: float) -> ReleaseDecision:
        policy = _policy(4, floor=2, profile=ReleaseProfile(price=1.0, wall_budget=0.05))
        first = {0: [2000], 1: [2000], 2: [2000]}
        policy.decide(_view(first, num_ranks=4, at_s=20.0))
        then = {rank: [2100] for rank in first}
        policy.decide(_view(then, num_ranks=4, members=[0, 1, 2], at_s=21.0))
        later = {rank: [2300] for rank in first}
        return policy.decide(_view(later, num_ranks=4, members=[0, 1, 2], at_s=at_s))

    assert not second(23.0).is_stay
    assert "budget" in second(70.0).reason


def test_what_is_nearly_done_is_waited_for() -> None:
    """A runaway would move, but its neighbour is about to end: then there is less to prefill."""
    running = {0: [9000] * 3, 1: [9000] * 3, 2: [6000, CAP - 12]}
    policy = _policy(3, floor=2, profile=MAX)
    decision = policy.decide(_view(running, num_ranks=3))
    assert decision.is_stay
    assert "a little later" in decision.reason
    running = {0: [9016] * 3, 1: [9016] * 3, 2: [6016]}
    decision = policy.decide(_view(running, num_ranks=3, at_s=50.2))
    assert [move.response_id for move in decision.moves] == ["2/0"]


def test_a_rank_with_a_queue_keeps_its_responses() -> None:
    view = _view({rank: [9000] for rank in range(3)}, num_ranks=3)
    waiting = RunningResponse(
        response_id="q", prompt_tokens=10, generated_tokens=0, prediction=RUNAWAY, is_queued=True
    )
    queued = GroupView(
        at_s=view.at_s,
        num_ranks=3,
        members=view.members,
        responses=tuple(
            (*on_rank, waiting) if rank < 2 else on_rank for rank, on_rank in enumerate(view.responses)
        ),
    )
    assert _policy(3, floor=1, profile=MAX).decide(queued).leavers in ((), (2,))


@pytest.mark.parametrize(("price", "most"), [(3.0, 1 / 7), (2.0, 1 / 5), (1.0, 1 / 3)])
@given(share=st.floats(0.3, 1.7).filter(lambda share: abs(share - 1) > 0.02))
@settings(max_examples=15)
def test_half_the_group_is_taken_while_an_iteration_grows_by_less(
    price: float, most: float, share: float
) -> None:
    class Clock:
        name = "steps"

        def decode_s(self, load: GroupLoad) -> float:
            return 1.0 + (share * most if load.num_ranks <= 4 else 0.0)

        def prefill_s(self, max_new_tokens: int) -> float:
            return 0.0

        def switch_s(self, num_ranks_before: int, num_ranks_after: int) -> float:
            return 0.0

    policy = CostBasedRelease(
        clock=Clock(),
        num_ranks=8,
        floor=4,
        profile=ReleaseProfile(price=price, wall_budget=None),
        allowed=AllowedSets.of_sizes([8, 4]),
    )
    decision = policy.decide(_view({rank: [1000] for rank in range(8)}, num_ranks=8))
    assert decision.is_stay == (share > 1)


def test_only_allowed_sets_are_made() -> None:
    drained = {0: [3000], 3: [3000]}
    halves = _policy(8, profile=DRAINED, allowed=AllowedSets.of_sizes([8, 4])).decide(
        _view(drained, num_ranks=8)
    )
    assert len(halves.leavers) == 4
    sets = AllowedSets.of_members([range(8), (0, 1, 2, 3), (0, 1, 4, 5)])
    listed = _policy(8, floor=4, profile=DRAINED, allowed=sets).decide(_view(drained, num_ranks=8))
    assert listed.leavers == (4, 5, 6, 7)
    # Rank 3 is busy, so the second set needs a move.
    only = AllowedSets.of_members([(0, 1, 4, 5)])
    assert _policy(8, floor=4, profile=DRAINED, allowed=only).decide(_view(drained, num_ranks=8)).is_stay
    moving = _policy(8, floor=4, profile=MAX, allowed=only).decide(_view(drained, num_ranks=8))
    assert [(move.source, move.target) for move in moving.moves] == [(3, 1)]


def test_large_groups_shrink_by_sixteenths() -> None:
    running = {rank: [3000] for rank in range(64)}
    for num_drained, num_leaving in ((3, 0), (4, 4)):
        busy = {rank: running[rank] for rank in range(64 - num_drained)}
        decision = _policy(64, profile=DRAINED).decide(_view(busy, num_ranks=64))
        assert len(decision.leavers) == num_leaving


def test_a_rank_that_came_back_for_late_work_stays() -> None:
    policy = _policy(3, profile=DRAINED)
    assert policy.decide(_view({0: [3000], 1: [3000]}, num_ranks=3)).leavers == (2,)
    policy.decide(_view({0: [3100], 1: [3100]}, num_ranks=3, members=[0, 1], at_s=51.0))
    policy.decide(_view({0: [3200], 1: [3200], 2: [5]}, num_ranks=3, at_s=52.0))
    assert policy.decide(_view({0: [3300], 1: [3300]}, num_ranks=3, at_s=53.0)).is_stay


def test_a_clock_that_was_wrong_twice_ends_moving() -> None:
    def after(*ratios: float) -> ReleaseDecision:
        policy = _policy(4, profile=MAX)
        policy.observe(predicted_s=1.0, observed_s=2.0)  # all sizes alike: no reason to stop
        assert policy.decide(_view({rank: [2000] for rank in range(3)}, num_ranks=4)).leavers
        members = [0, 1, 2]
        policy.decide(_view({rank: [2001] for rank in members}, num_ranks=4, members=members, at_s=51.0))
        for ratio in ratios:
            policy.observe(predicted_s=1.0, observed_s=2.0 * ratio)
        return policy.decide(
            _view({rank: [2900] for rank in members}, num_ranks=4, members=members, at_s=60.0)
        )

    assert after(1.2).moves
    assert after(1.2, 1.0, 1.2).moves
    stopped = after(1.2, 1.2)
    assert stopped.is_stay
    assert "slower than predicted" in stopped.reason


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="floor=5"):
        _policy(4, floor=5)
    with pytest.raises(ValueError, match="observed_s=0"):
        _policy(4).observe(predicted_s=1.0, observed_s=0.0)
