"""The server's own release: where requests go, who leaves, who comes back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_patches.release.rule import GroupNow, ServerRelease

QUIET_S = 0.1


def group(routed: tuple[int, ...] = (0, 1, 2, 3), floor: int = 1, is_still: bool = False) -> GroupNow:
    away = tuple(rank for rank in range(4) if rank not in routed)
    return GroupNow(routed=routed, away=away, floor=floor, is_still=is_still)


def rule() -> ServerRelease:
    return ServerRelease(4, quiet_s=QUIET_S)


def burst(release: ServerRelease, num: int, at_s: float = 0.0, now: GroupNow | None = None) -> list[int]:
    return [release.arrive(now or group(), at_s).dp_rank for _ in range(num)]


def test_a_burst_goes_round_as_sglang_would_deal_it() -> None:
    assert burst(rule(), 10) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_a_request_goes_to_the_rank_with_fewest() -> None:
    release = rule()
    burst(release, 8)
    for rank in (2, 2, 1):
        release.finish(rank)
    assert burst(release, 3) == [2, 1, 2]


def test_a_rank_that_the_driver_names_gets_it() -> None:
    release = rule()
    assert release.arrive(group(), 0.0, named=3).dp_rank == 3
    assert release.inflight == [0, 0, 0, 1]


def test_drained_ranks_leave_when_it_has_been_quiet() -> None:
    release = rule()
    burst(release, 8, at_s=1.0)
    for rank in (1, 1, 3, 3):
        release.finish(rank)
    assert release.leavers(group(), 1.05) == ()
    assert release.leavers(group(), 1.11) == (1, 3)


@pytest.mark.parametrize(("floor", "leavers"), [(1, (1, 2, 3)), (2, (2, 3)), (3, (3,)), (4, ())])
def test_the_floor_keeps_the_first_ranks(floor: int, leavers: tuple[int, ...]) -> None:
    release = rule()
    release.arrive(group(), 0.0, named=0)
    assert release.leavers(group(floor=floor), 1.0) == leavers


def test_nobody_leaves_before_a_step_after_it_or_while_the_group_must_stand_still() -> None:
    release = rule()
    assert release.leavers(group(), 9.0) == ()
    release.arrive(group(), 10.0)
    assert release.leavers(group(is_still=True), 11.0) == ()
    assert release.leavers(group(), 11.0) == (1, 2, 3)
    release.finish(0)
    assert release.leavers(group(), 12.0) == ()


def test_a_driver_that_starts_a_response_when_another_ends_loses_nobody() -> None:
    release = rule()
    burst(release, 4, at_s=0.0)
    for turn in range(1, 100):
        release.finish(turn % 4)
        assert release.leavers(group(), turn * 0.05 - 0.001) == ()
        assert release.arrive(group(), turn * 0.05).dp_rank == turn % 4


def test_a_refusal_is_not_asked_again_at_once() -> None:
    release = rule()
    release.arrive(group(), 0.0)
    release.refused(1.0)
    assert release.leavers(group(), 1.9) == ()
    assert release.leavers(group(), 2.0) == (1, 2, 3)


def test_late_requests_fill_those_who_serve_before_they_wake_anybody() -> None:
    release = rule()
    burst(release, 12)
    for rank in (0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3):
        release.finish(rank)
    small = group(routed=(0,))
    # Up to the three that every rank had, and only then the ranks that have left.
    assert burst(release, 5, now=small) == [0, 0, 1, 2, 3]
    assert release.num_wakes == 3


def test_every_wake_doubles_the_wait_until_the_next_step() -> None:
    release = rule()
    release.arrive(group(), 0.0, named=0)
    release.arrive(group(routed=(0,)), 1.0, named=2)
    release.arrive(group(routed=(0,)), 1.0, named=2)
    assert release.num_wakes == 1, "woken once, however many requests wait there"
    for rank in (2, 2):
        release.finish(rank)
    assert release.leavers(group(routed=(0, 2)), 1.15) == ()
    assert release.leavers(group(routed=(0, 2)), 1.21) == (2,)
    release.finish(0)
    release.arrive(group(), 2.0, named=0)
    assert release.leavers(group(), 2.11) == (1, 2, 3)


def test_the_first_request_after_nothing_ran_begins_a_step_for_everybody() -> None:
    release = rule()
    assert release.arrive(group(routed=(1,)), 0.0).begins_step
    assert not release.arrive(group(routed=(1,)), 0.0).begins_step
    # Those who are away are on their way back: the step is dealt to all, and none of them counts as woken.
    assert burst(release, 6, now=group(routed=(1,))) == [3, 0, 1, 2, 3, 0]
    assert release.num_wakes == 0


ACTIONS = st.lists(st.tuples(st.sampled_from(["arrive", "finish", "look"]), st.floats(0.0, 0.5)), max_size=60)


@settings(deadline=None)
@given(actions=ACTIONS, floor=st.integers(1, 4))
def test_in_any_order_of_things_the_floor_holds_and_no_busy_rank_leaves(
    actions: list[tuple[str, float]], floor: int
) -> None:
    release, routed, at_s = rule(), (0, 1, 2, 3), 0.0
    running: list[int] = []
    for action, later_s in actions:
        at_s += later_s
        if action == "arrive":
            placed = release.arrive(group(routed, floor), at_s)
            running.append(placed.dp_rank)
            if placed.begins_step:
                routed = (0, 1, 2, 3)
            routed = tuple(sorted({*routed, placed.dp_rank}))
        elif action == "finish" and running:
            release.finish(running.pop(0))
        else:
            leavers = release.leavers(group(routed, floor), at_s)
            routed = tuple(rank for rank in routed if rank not in leavers)
            assert not {*leavers} & {*running}
        assert len(routed) >= floor
        assert release.num_running == len(running)
