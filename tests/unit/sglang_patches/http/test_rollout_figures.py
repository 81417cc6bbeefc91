"""What a marked step cost."""

import pytest

from flexfloor.membership.status import RolloutFigures
from sglang_patches.http.rollout import Presence, RolloutEnd, RolloutStart, figures


def presence() -> Presence:
    """Four ranks from 0 s, two of them from 10 s to 20 s."""
    found = Presence((0, 1, 2, 3), 0.0)
    found.change((0, 1), 10.0)
    found.change((0, 1, 2, 3), 20.0)
    return found


@pytest.mark.parametrize(
    ("from_s", "to_s", "occupied_s"),
    [(0, 10, 40), (0, 20, 60), (5, 15, 30), (12, 18, 12), (0, 30, 100), (25, 30, 20), (7, 7, 0)],
)
def test_occupied_time_is_that_of_members(from_s: float, to_s: float, occupied_s: float) -> None:
    assert presence().occupied_s(from_s, to_s) == occupied_s


def test_leavers_count_each_time() -> None:
    found = presence()
    found.change((0, 2, 3), 22.0)
    assert found.num_left(0.0, 30.0) == 3
    assert found.num_left(10.0, 22.0) == 1
    assert found.num_left(0.0, 9.0) == 0


def test_what_was_before_a_step_can_be_forgotten() -> None:
    found = presence()
    found.forget_before(12.0)
    assert found.occupied_s(12.0, 30.0) == 56
    assert found.num_left(0.0, 30.0) == 0


def test_a_change_reported_late_does_not_go_back_in_time() -> None:
    found = Presence((), 5.0)
    found.change((0, 1), 4.0)
    assert found.occupied_s(0.0, 7.0) == 4


START = RolloutStart(rollout_step=3, at_s=100.0, num_tokens=50, iterations={0: 10, 1: 10})
END = RolloutEnd(at_s=110.0, num_tokens=250, membership_epoch=4, occupied_worker_s=13.0, num_releases=1)


def test_figures() -> None:
    assert figures(START, END, {0: 90, 1: 40}, 2) == RolloutFigures(
        wall_s=10.0,
        occupied_worker_s=13.0,
        static_occupied_worker_s=20.0,
        response_tokens=200,
        worker_iterations=110,
        static_worker_iterations=160,
        num_releases=1,
        membership_epoch=4,
    )


def test_without_the_count_of_a_rank_that_has_gone_there_are_none() -> None:
    found = figures(START, END, {0: 90}, 2)
    assert (found.worker_iterations, found.static_worker_iterations) == (None, None)
    assert found.response_tokens == 200
