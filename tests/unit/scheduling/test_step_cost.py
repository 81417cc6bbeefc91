"""The price of a placed step, against steps small enough to be priced by hand."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.scheduling.cost import GroupLoad
from flexfloor.scheduling.step_cost import StepCost, step_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearClock:
    per_running_s: float = 0.0
    per_context_token_s: float = 0.0
    per_prefill_token_s: float = 0.0
    stall_s: float = 0.0
    name: str = "linear"

    def decode_s(self, load: GroupLoad) -> float:
        loaded = self.per_running_s * load.max_running
        return 1.0 + loaded + self.per_context_token_s * load.max_context_tokens

    def prefill_s(self, max_new_tokens: int) -> float:
        return self.per_prefill_token_s * max_new_tokens

    def switch_s(self, num_ranks_before: int, num_ranks_after: int) -> float:
        assert num_ranks_after < num_ranks_before
        return self.stall_s


def price(
    lengths: list[int],
    ranks: list[int],
    sizes: tuple[int, ...],
    clock: LinearClock,
    prompts: int = 0,
) -> StepCost:
    ends = np.array([lengths], dtype=np.int64)
    return step_cost(
        ends,
        np.zeros_like(ends),
        prompt_tokens=np.full(len(lengths), prompts, dtype=np.int64),
        ranks=np.array(ranks, dtype=np.int64),
        sizes=sizes,
        clock=clock,
    )


def test_drained_ranks_are_occupied_until_a_smaller_size_fits() -> None:
    lengths, ranks = [10, 20, 30, 100], [3, 2, 1, 0]
    every = price(lengths, ranks, (4, 3, 2, 1), LinearClock())
    assert (every.wall_s, every.occupied_s) == (100, 160)
    halves = price(lengths, ranks, (4, 2), LinearClock())
    assert (halves.wall_s, halves.occupied_s) == (100, 4 * 20 + 2 * 80)
    assert price(lengths, ranks, (4,), LinearClock()).occupied_s == 400


def test_the_fullest_rank_sets_the_pace() -> None:
    # Two on rank 0 and one on rank 1 for 10 iterations, then one alone for 10.
    cost = price([10, 20, 10], [0, 0, 1], (2,), LinearClock(per_running_s=0.5))
    assert cost.wall_s == pytest.approx(10 * 2.0 + 10 * 1.5)


def test_context_grows_and_prefill_is_paid_once_by_the_fullest_rank() -> None:
    clock = LinearClock(per_context_token_s=0.01, per_prefill_token_s=0.1)
    cost = price([10], [0], (2, 1), clock, prompts=100)
    # The middle of the only span holds 100 + 5 tokens.
    assert cost.wall_s == pytest.approx(100 * 0.1 + 10 * (1 + 1.05))
    assert cost.max_context_tokens == 105


def test_a_switch_stalls_all_that_were_there_and_is_left_out_where_it_costs_more() -> None:
    lengths, ranks = [10, 100], [1, 0]
    cheap = price(lengths, ranks, (2, 1), LinearClock(stall_s=5.0))
    assert (cheap.wall_s, cheap.occupied_s) == (105, 2 * 10 + 2 * 5 + 90)
    dear = price(lengths, ranks, (2, 1), LinearClock(stall_s=50.0))
    assert (dear.wall_s, dear.occupied_s) == (100, 200)


def test_objective_prices_wall_time_of_the_full_group() -> None:
    cost = StepCost(wall_s=10.0, occupied_s=50.0, max_context_tokens=0)
    assert cost.objective(3.0, 8) == 50 + 3 * 8 * 10
    assert cost.objective(float("inf"), 8) == 10


@settings(max_examples=40, deadline=None)
@given(
    responses=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 4)), min_size=1, max_size=60),
    sizes=st.sets(st.integers(1, 5)).map(lambda some: tuple({*some, 5})),
)
def test_occupied_lies_between_the_floor_and_the_full_group(
    responses: list[tuple[int, int]], sizes: tuple[int, ...]
) -> None:
    lengths, ranks = [length for length, _ in responses], [rank for _, rank in responses]
    cost = price(lengths, ranks, sizes, LinearClock())
    longest = max(lengths)
    assert cost.wall_s == longest
    assert min(sizes) * longest <= cost.occupied_s <= 5 * longest
