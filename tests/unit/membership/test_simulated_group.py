"""Random groups in simulated time: every operation and fence ends, every request is served."""

import pytest
from simulated_group import SimGroup

ACTIVE_S = 20.0
SETTLE_S = 200.0


def load(group: SimGroup, *, num_requests: int, num_orders: int) -> None:
    rng = group.rng
    for _ in range(num_requests):
        group.at(rng.uniform(0, ACTIVE_S), lambda: group.request(rng.randint(1, 60)))
    ranks = range(len(group.agents))
    for number in range(num_orders):
        some = tuple(rng.sample(ranks, rng.randint(1, len(ranks) - 1)))
        wait_s, kind = rng.uniform(0, ACTIVE_S), rng.random()
        if kind < 0.5:
            group.at(wait_s, lambda name=f"release{number}", some=some: group.release(name, some))
        elif kind < 0.8:
            some = some if rng.random() < 0.5 else ()
            group.at(wait_s, lambda name=f"rejoin{number}", some=some: group.rejoin(name, some))
        else:
            full = rng.random() < 0.5
            group.at(wait_s, lambda name=f"fence{number}", full=full: group.fence(name, full))


def run(seed: int, *, prepare_timeout_s: float, delay_s: float) -> SimGroup:
    group = SimGroup(
        seed, ep_size=2 + seed % 4, floor=1, delay_s=delay_s, prepare_timeout_s=prepare_timeout_s
    )
    load(group, num_requests=25, num_orders=12)
    group.run(ACTIVE_S + SETTLE_S)
    membership = group.membership
    assert membership.failed is None
    assert group.is_at_rest, membership.story()
    assert tuple(agent.ep_rank for agent in group.agents if agent.is_member) == membership.members
    return group


@pytest.mark.parametrize("delay_s", [0.01, 0.3, 2.0])
def test_every_operation_ends_and_no_request_waits_for_ever(delay_s: float) -> None:
    groups = [run(seed, prepare_timeout_s=1000, delay_s=delay_s) for seed in range(12)]
    assert sum(group.membership.membership_epoch for group in groups) > 30
    # Slow links make the change slower than the requests under way, which then stop it instead.
    num_met = sum(group.num_wakes if delay_s < 1 else group.num_cancels for group in groups)
    assert num_met > 0


def test_cancels_at_any_moment_leave_the_group_whole() -> None:
    """Plans are cancelled about when they are agreed, so both ends of the race occur."""
    groups = [run(seed, prepare_timeout_s=1.0, delay_s=1.0) for seed in range(24)]
    assert sum(group.num_cancels for group in groups) > 20
    assert sum(len(group.membership.dead_epochs) for group in groups) > 10
    late = sum(group.num_cancels - len(group.membership.dead_epochs) for group in groups)
    assert late > 0, "no cancel came too late"
