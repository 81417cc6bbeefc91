"""The ranks' logs as the rows of a step, with members that come and go, and the step on disk."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexfloor.iterations import RECORD, StepIterations
from flexfloor.rollout.iteration_log import (
    IterationLogError,
    iterations_path,
    load_iterations,
    log_path,
    read_step,
    save_iterations,
)
from flexfloor.types import EngineCounters

Row = tuple[int, int, int, int, int, int]


def counters(*num_iterations: int) -> EngineCounters:
    zeros = (0,) * len(num_iterations)
    return EngineCounters(
        num_iterations=num_iterations, num_prefill_iterations=zeros, num_idle_iterations=zeros
    )


def write(folder: Path, *ranks: Sequence[Row]) -> Path:
    for rank, rows in enumerate(ranks):
        log_path(folder, rank).write_bytes(np.array(list(rows), RECORD).tobytes())
    return folder


def decode(epoch: int, context: int, running: int = 1, *, retracted: int = 0, took_us: int = 10) -> Row:
    return (epoch, context, 0, running, retracted, took_us)


def prefill(epoch: int, tokens: int, *, took_us: int = 10) -> Row:
    return (epoch, 0, tokens, 0, 0, took_us)


def idle(epoch: int, *, took_us: int = 10) -> Row:
    return (epoch, 0, 0, 0, 0, took_us)


def same(a: StepIterations, b: StepIterations) -> bool:
    return all(
        np.array_equal(np.asarray(getattr(a, f.name)), np.asarray(getattr(b, f.name))) for f in fields(a)
    )


def test_a_static_step_is_what_lies_between_its_counters(tmp_path: Path) -> None:
    warm_up = [decode(0, 99)] * 3
    first = [*warm_up, prefill(0, 12), decode(0, 13), decode(0, 14, retracted=2), decode(0, 98)]
    second = [*warm_up, idle(0), prefill(0, 5), decode(0, 6), decode(0, 98)]
    write(tmp_path, first, second)
    step = read_step(tmp_path, counters(3, 3), counters(6, 6))
    assert step.context_tokens.tolist() == [[0, 0], [13, 0], [14, 6]]
    assert step.prefill_tokens.tolist() == [[12, 0], [0, 5], [0, 0]]
    assert step.num_running.tolist() == [[0, 0], [1, 0], [1, 1]]
    assert step.is_member.all()
    assert (step.num_iterations, step.worker_iterations, step.idle_worker_iterations) == (3, 6, 1)
    assert (step.num_retractions, step.num_switches) == (2, 0)


def test_ranks_leave_and_return_and_the_rows_stay_in_step(tmp_path: Path) -> None:
    stays = [decode(2, n) for n in (1, 2)] + [decode(3, n) for n in (3, 4, 5)] + [decode(6, 6)]
    leaves = [decode(2, 11), idle(2), idle(6, took_us=4000)]
    write(tmp_path, stays, leaves)
    step = read_step(tmp_path, counters(0, 0), counters(6, 3))
    assert step.is_member.tolist() == [[True, True]] * 2 + [[True, False]] * 3 + [[True, True]]
    assert step.context_tokens[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert step.context_tokens[:, 1].tolist() == [11, 0, 0, 0, 0, 0]
    assert (step.worker_iterations, step.num_switches) == (9, 2)


def test_time_stands_in_the_next_record_of_who_was_there(tmp_path: Path) -> None:
    # Rank 1 waits for rank 0 outside the group from row 1 on; both wait 5 s before the step.
    here = [idle(0, took_us=5_000_000), decode(0, 1, took_us=30), decode(1, 2, took_us=700), decode(2, 3)]
    away = [idle(0, took_us=5_000_000), idle(0, took_us=20), idle(2, took_us=999)]
    write(tmp_path, here, away)
    step = read_step(tmp_path, counters(0, 0), counters(4, 3))
    assert step.seconds is not None
    assert step.seconds.tolist() == pytest.approx([20e-6, 700e-6, 10e-6, 10e-6])
    single = read_step(tmp_path, counters(0, 0), counters(1, 1))
    assert single.seconds is None


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_rank_that_was_asked_one_iteration_later_is_cut_to_the_others(tmp_path: Path, ahead: int) -> None:
    rows = [decode(0, n) for n in range(1, 9)]
    write(tmp_path, rows, rows)
    before, after = [2, 2], [7, 7]
    before[ahead] += 1
    after[1 - ahead] += 1
    step = read_step(tmp_path, counters(*before), counters(*after))
    # Rows are aligned by their place in the epoch, not by their place in the step.
    assert step.context_tokens.tolist() == [[n, n] for n in range(4, 8)]


def test_an_epoch_that_began_before_the_step_is_aligned_by_its_begin(tmp_path: Path) -> None:
    # Rank 1 was away for three iterations, so that the same iteration has another index on it.
    first = [decode(0, 1), *[decode(1, 2)] * 3, *[decode(4, n) for n in (10, 11, 12, 13)]]
    second = [decode(0, 1), *[decode(4, n) for n in (20, 21, 22, 23)]]
    write(tmp_path, first, second)
    step = read_step(tmp_path, counters(5, 3), counters(8, 5))
    assert step.context_tokens.tolist() == [[12, 22], [13, 23]]


@pytest.mark.parametrize(
    ("after", "text"),
    [((4, 2), r"membership_epoch 0, by ep_rank: \{0: \(0, 4\), 1: \(0, 2\)\}"), ((9, 4), "has 4 records")],
)
def test_logs_that_contradict_each_other_or_the_counters_are_refused(
    tmp_path: Path, after: tuple[int, int], text: str
) -> None:
    write(tmp_path, [idle(0)] * 4, [idle(0)] * 4)
    with pytest.raises(IterationLogError, match=text):
        read_step(tmp_path, counters(0, 0), counters(*after))


def test_only_the_last_epoch_may_end_apart(tmp_path: Path) -> None:
    write(tmp_path, [idle(0), idle(0), idle(1)], [idle(0), idle(1)])
    with pytest.raises(IterationLogError, match="membership_epoch 0"):
        read_step(tmp_path, counters(0, 0), counters(3, 2))


def test_no_iterations_are_an_empty_step(tmp_path: Path) -> None:
    write(tmp_path, [idle(0)], [idle(0)])
    step = read_step(tmp_path, counters(1, 1), counters(1, 1))
    assert (step.num_iterations, step.num_ranks, step.num_switches) == (0, 2, 0)
    save_iterations(tmp_path / "x.npz", step)
    assert same(load_iterations(tmp_path / "x.npz"), step)


def recorded(lengths: Sequence[Sequence[int]], prompt_tokens: int, seed: int) -> StepIterations:
    """Responses that start together on their ranks; a rank leaves when it has none any more."""
    generator = np.random.default_rng(seed)
    num_rows = max(max(own) for own in lengths)
    shape = (num_rows, len(lengths))
    alive = np.array([[sum(n > row for n in own) for own in lengths] for row in range(num_rows)])
    context = np.array(
        [[sum(prompt_tokens + row for n in own if n > row) for own in lengths] for row in range(num_rows)]
    )
    prefill = np.zeros(shape, np.int64)
    prefill[0] = [prompt_tokens * len(own) for own in lengths]
    alive[0], context[0] = 0, 0
    return StepIterations(
        repeats=np.ones(num_rows, np.int64),
        is_member=(alive > 0) | (np.arange(num_rows) < 5)[:, None],
        num_running=alive,
        context_tokens=context,
        prefill_tokens=prefill,
        num_retractions=3,
        seconds=np.round(0.012 + 0.0003 * generator.standard_normal(num_rows), 6),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=5), min_size=1, max_size=9),
    prompt_tokens=st.integers(1, 70_000),
)
def test_what_is_saved_is_what_is_loaded(
    tmp_path: Path, lengths: list[list[int]], prompt_tokens: int
) -> None:
    step = recorded(lengths, prompt_tokens, seed=1)
    save_iterations(tmp_path / "s.npz", step)
    loaded = load_iterations(tmp_path / "s.npz")
    assert loaded.seconds == pytest.approx(step.seconds)
    assert same(replace(loaded, seconds=None), replace(step, seconds=None))
    bare = replace(step, seconds=None)
    save_iterations(tmp_path / "s.npz", bare)
    assert same(load_iterations(tmp_path / "s.npz"), bare)


def test_a_realistic_step_takes_a_few_bytes_an_iteration(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    lengths = np.minimum(np.exp(generator.normal(7.5, 0.9, (8, 32))), 16_000).astype(int)
    step = recorded(lengths.tolist(), 300, seed=2)
    path = iterations_path(tmp_path, 12)
    save_iterations(path, step)
    assert path == tmp_path / "iterations" / "step-000012.npz"
    assert step.num_iterations > 10_000
    # 8 ranks log 160 bytes an iteration.
    assert path.stat().st_size / step.num_iterations < 4
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_rows_that_stand_for_several_iterations_are_no_record(tmp_path: Path) -> None:
    step = recorded([[3, 4]], 5, seed=0)
    with pytest.raises(ValueError, match="each row is one iteration"):
        save_iterations(tmp_path / "s.npz", replace(step, repeats=step.repeats * 2))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"something else"])
def test_a_file_that_holds_no_step_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "step.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"step\.npz does not hold the iterations of a step"):
        load_iterations(path)
    with path.open("wb") as file:
        np.savez(file, num_rows=np.array(2))
    with pytest.raises(ValueError, match="does not hold"):
        load_iterations(path)
