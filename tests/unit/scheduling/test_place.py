"""Placement policies, by values and by property."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfloor.config import SchedulingConfig
from flexfloor.config.schema import Placement
from flexfloor.scheduling.place import LeastInflight, RoundRobin, make_placement, running_limit_per_rank


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


def test_config_names_the_policy() -> None:
    chosen = {
        placement: make_placement(SchedulingConfig(placement=placement), num_ranks=4, max_running_requests=8)
        for placement in Placement
    }
    assert isinstance(chosen[Placement.round_robin], RoundRobin)
    held = chosen[Placement.least_inflight]
    assert [held.submit(str(i)) for i in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, None]


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
