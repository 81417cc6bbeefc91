"""Who leaves when: values first, then what holds for any course of a step."""

from hypothesis import given
from hypothesis import strategies as st

from flexfloor.scheduling.release import DrainedRelease

ALL = (0, 1, 2, 3)


def test_a_rank_leaves_when_it_has_nothing_left_whichever_it_is() -> None:
    release = DrainedRelease(floor=1, hold_s=0.0)
    assert release.decide(now_s=0.0, inflight=(2, 2, 2, 2), members=ALL) == ()
    assert release.decide(now_s=1.0, inflight=(0, 2, 2, 1), members=ALL) == (0,)
    assert release.decide(now_s=2.0, inflight=(0, 0, 1, 0), members=(1, 2, 3)) == (1, 3)


def test_the_floor_holds_the_last_drained_rank() -> None:
    release = DrainedRelease(floor=2, hold_s=0.0)
    release.decide(now_s=0.0, inflight=(1, 1, 0, 1), members=ALL)
    assert release.decide(now_s=1.0, inflight=(0, 1, 0, 0), members=ALL) == (2, 0)


def test_nobody_leaves_when_the_step_is_over() -> None:
    release = DrainedRelease(floor=1, hold_s=0.0)
    assert release.decide(now_s=5.0, inflight=(0, 0, 0, 0), members=ALL) == ()


def test_a_rank_is_held_for_late_work() -> None:
    release = DrainedRelease(floor=1, hold_s=1.0)
    assert release.decide(now_s=0.0, inflight=(0, 1, 1, 1), members=ALL) == ()
    assert release.decide(now_s=0.5, inflight=(1, 1, 1, 1), members=ALL) == ()
    assert release.decide(now_s=1.2, inflight=(0, 1, 1, 1), members=ALL) == ()
    assert release.decide(now_s=2.2, inflight=(0, 1, 1, 1), members=ALL) == (0,)


def test_a_rank_that_came_back_for_late_work_stays() -> None:
    release = DrainedRelease(floor=1, hold_s=0.0)
    assert release.decide(now_s=0.0, inflight=(0, 1, 1, 1), members=ALL) == (0,)
    assert release.decide(now_s=1.0, inflight=(1, 1, 1, 1), members=ALL) == ()
    assert release.decide(now_s=2.0, inflight=(0, 1, 1, 1), members=ALL) == ()


@given(
    st.integers(1, 4),
    st.floats(0.0, 2.0),
    st.lists(st.tuples(*[st.integers(0, 2)] * 4), min_size=1, max_size=30),
)
def test_only_drained_members_leave_and_never_below_the_floor(
    floor: int, hold_s: float, course: list[tuple[int, ...]]
) -> None:
    release = DrainedRelease(floor=floor, hold_s=hold_s)
    members = set(ALL)
    for step, inflight in enumerate(course):
        leaving = release.decide(now_s=float(step), inflight=inflight, members=sorted(members))
        assert all(inflight[rank] == 0 and rank in members for rank in leaving)
        members -= set(leaving)
        assert len(members) >= floor
        members |= {rank for rank in ALL if inflight[rank]}
