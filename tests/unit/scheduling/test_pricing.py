"""Pricing a schedule, row by row and as a whole."""

import time

import numpy as np
import pytest

from flexfloor.iterations import StepIterations
from flexfloor.scheduling.clocks import GpuClock, NeutralClock
from flexfloor.scheduling.cost import GroupLoad
from flexfloor.scheduling.pricing import price


def _rows(*rows: tuple[int, list[int], list[int], list[int], list[int]]) -> StepIterations:
    repeats, members, running, context, prefill = (np.array(column) for column in zip(*rows, strict=True))
    return StepIterations(
        repeats=repeats,
        is_member=members.astype(bool),
        num_running=running,
        context_tokens=context,
        prefill_tokens=prefill,
        num_retractions=0,
    )


def test_every_part_of_a_step_is_priced() -> None:
    clock = GpuClock()
    steps = _rows(
        (1, [1, 1], [0, 0], [0, 0], [300, 500]),
        (100, [1, 1], [3, 1], [900, 700], [0, 0]),
        (50, [1, 0], [2, 0], [800, 0], [0, 0]),
    )

    def decode_s(ranks: int, running: int, most: int, context: int) -> float:
        return clock.decode_s(
            GroupLoad(num_ranks=ranks, num_running=running, max_running=most, max_context_tokens=context)
        )

    first, second, third = decode_s(2, 0, 0, 0), 100 * decode_s(2, 4, 3, 900), 50 * decode_s(1, 2, 2, 800)
    prefill, stall = clock.prefill_s(500), clock.switch_s(2, 1)
    found = price(steps, clock, full_size=2)
    assert found.decode_s == pytest.approx(first + second + third)
    assert (found.prefill_s, found.switch_s) == (pytest.approx(prefill), pytest.approx(stall))
    assert found.wall_s == pytest.approx(first + second + third + prefill + stall)
    assert found.occupied_worker_s == pytest.approx(2 * (first + second + prefill + stall) + third)
    assert found.occupied_share == pytest.approx(found.occupied_worker_s / (2 * found.wall_s))
    assert (found.num_switches, found.rejoin_s) == (1, clock.switch_s(1, 2))


def test_under_the_neutral_clock_a_step_costs_its_iterations() -> None:
    steps = _rows((1, [1, 1], [0, 0], [0, 0], [9, 9]), (7, [1, 0], [1, 0], [5, 0], [0, 0]))
    found = price(steps, NeutralClock(), full_size=2)
    assert found.wall_s == steps.num_iterations == 8
    assert found.occupied_worker_s == steps.worker_iterations == 9


def test_a_step_that_starts_small_pays_for_getting_there() -> None:
    clock, steps = GpuClock(), _rows((10, [1, 0], [1, 0], [5, 0], [0, 0]))
    small, full = price(steps, clock, full_size=2), price(steps, clock, full_size=1)
    assert small.switch_s == clock.switch_s(2, 1)
    assert small.occupied_worker_s == pytest.approx(full.occupied_worker_s + 2 * small.switch_s)
    assert (small.num_switches, full.num_switches, full.rejoin_s) == (1, 0, 0.0)
    with pytest.raises(ValueError, match="full_size=0"):
        price(steps, clock, full_size=0)


def test_a_hundred_thousand_rows_are_fast() -> None:
    rng, rows = np.random.default_rng(0), 100_000
    running = rng.integers(0, 20, (rows, 8))
    is_member = np.ones((rows, 8), dtype=bool)
    is_member[rows // 2 :, 5:] = False
    steps = StepIterations(
        repeats=np.ones(rows, dtype=np.int64),
        is_member=is_member,
        num_running=running * is_member,
        context_tokens=running * 2000 * is_member,
        prefill_tokens=(rng.random((rows, 8)) < 0.001) * rng.integers(1, 3000, (rows, 8)),
        num_retractions=0,
    )
    begin = time.process_time()
    found = price(steps, GpuClock(), full_size=8)
    assert time.process_time() - begin < 1.0
    assert found.num_switches == 1


def test_nothing_costs_nothing() -> None:
    empty = StepIterations(
        repeats=np.zeros(0, dtype=np.int64),
        is_member=np.zeros((0, 2), dtype=bool),
        num_running=np.zeros((0, 2), dtype=np.int64),
        context_tokens=np.zeros((0, 2), dtype=np.int64),
        prefill_tokens=np.zeros((0, 2), dtype=np.int64),
        num_retractions=0,
    )
    found = price(empty, GpuClock(), full_size=2)
    assert (found.wall_s, found.num_switches, found.occupied_share) == (0.0, 0, 1.0)
