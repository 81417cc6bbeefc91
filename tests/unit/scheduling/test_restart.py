"""A release that would cost a restart of the server."""

import pytest

from flexfloor.scheduling.decision import GroupView, ReleaseDecision, ReleasePolicy
from flexfloor.scheduling.restart import RestartPriced


class Orders(ReleasePolicy):
    """Always the same decision; keeps what it was told."""

    def __init__(self, decision: ReleaseDecision) -> None:
        self.decision = decision
        self.observed: list[tuple[float, float]] = []

    def decide(self, view: GroupView) -> ReleaseDecision:
        return self.decision

    def observe(self, *, predicted_s: float, observed_s: float) -> None:
        self.observed.append((predicted_s, observed_s))


def view(*members: int) -> GroupView:
    return GroupView(at_s=1.0, num_ranks=4, members=members, responses=((),) * 4)


# 5 s of 4 ranks at price 3: 80 s of worker time.
@pytest.mark.parametrize(
    ("gain_s", "members", "leaves"),
    [
        (80.1, (0, 1, 2, 3), True),
        (80.0, (0, 1, 2, 3), False),
        # Somebody is gone: the restart is due already.
        (0.1, (0, 1, 2), True),
    ],
)
def test_the_first_exit_of_a_step_must_gain_more_than_the_restart(
    gain_s: float, members: tuple[int, ...], leaves: bool
) -> None:
    order = ReleaseDecision(leavers=(2,), reason="gain", predicted_gain_s=gain_s, predicted_remaining_s=9.0)
    decision = RestartPriced(policy=Orders(order), restart_s=5.0, price=3.0).decide(view(*members))
    if leaves:
        assert decision == order
    else:
        reason = "gain; the server's restart weighs 80 s"
        assert decision == ReleaseDecision(reason=reason, predicted_remaining_s=9.0)


def test_a_free_restart_and_a_stay_change_nothing() -> None:
    order = ReleaseDecision(leavers=(2,), predicted_gain_s=0.1)
    stay = ReleaseDecision(reason="all have work")
    free = RestartPriced(policy=Orders(order), restart_s=0.0, price=3.0)
    assert free.decide(view(0, 1, 2, 3)) == order
    dear = RestartPriced(policy=Orders(stay), restart_s=5.0, price=3.0)
    assert dear.decide(view(0, 1, 2, 3)) is stay


def test_the_policy_learns_what_iterations_take() -> None:
    inner = Orders(ReleaseDecision())
    RestartPriced(policy=inner, restart_s=5.0, price=3.0).observe(predicted_s=1.0, observed_s=2.0)
    assert inner.observed == [(1.0, 2.0)]
