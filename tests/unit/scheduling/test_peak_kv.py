"""Sampled lengths, queues and KV peaks, against a count iteration by iteration."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.peak_kv import peak_kv_tokens, sample_lengths, start_iterations

RESPONSES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9), st.integers(0, 2)), max_size=14)
"""(length, prompt tokens, rank)"""


def ints(values: list[Any]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def count_up(responses: list[tuple[int, int, int]], limit: int | None) -> tuple[list[int], list[int]]:
    """Starts by response and peaks by rank, from running every iteration."""
    starts, peaks = [0] * len(responses), [0, 0, 0]
    for rank in range(3):
        waiting = [index for index, response in enumerate(responses) if response[2] == rank]
        running: dict[int, int] = {}
        now = 0
        while waiting or running:
            while waiting and (limit is None or len(running) < limit):
                starts[waiting[0]] = now
                running[waiting.pop(0)] = 0
            now += 1
            running = {index: made + 1 for index, made in running.items()}
            held = sum(responses[index][1] + made for index, made in running.items())
            peaks[rank] = max(peaks[rank], held)
            running = {index: made for index, made in running.items() if made < responses[index][0]}
    return starts, peaks


@settings(max_examples=80, deadline=None)
@given(responses=RESPONSES, limit=st.integers(1, 4) | st.none())
def test_starts_and_peaks_are_those_of_running_every_iteration(
    responses: list[tuple[int, int, int]], limit: int | None
) -> None:
    lengths, prompts, ranks = (ints([row[column] for row in responses]) for column in range(3))
    # A second scenario, twice as long, must not mix with the first.
    both = np.stack([lengths, 2 * lengths])
    starts = start_iterations(both, ranks, num_ranks=3, running_limit=limit)
    peaks = peak_kv_tokens(both, starts, prompt_tokens=prompts, ranks=ranks, num_ranks=3)
    for row, factor in enumerate((1, 2)):
        expected = count_up([(factor * a, b, c) for a, b, c in responses], limit)
        assert (starts[row].tolist(), peaks[row].tolist()) == expected


def test_a_waiting_response_takes_the_first_place_that_becomes_free() -> None:
    lengths = ints([[9, 2, 5, 5]])
    starts = start_iterations(lengths, ints([0, 0, 0, 0]), num_ranks=1, running_limit=2)
    assert starts.tolist() == [[0, 0, 2, 7]]


def test_without_responses_nothing_is_held() -> None:
    nothing = np.zeros((2, 0), dtype=np.int64)
    peaks = peak_kv_tokens(nothing, nothing, prompt_tokens=ints([]), ranks=ints([]), num_ranks=3)
    assert peaks.tolist() == [[0, 0, 0]] * 2


def test_samples_have_the_predicted_median_and_share_at_the_cap() -> None:
    prediction = LengthPrediction(mean_log=math.log(200), sd_log=0.5, cap_share=0.25, cap_tokens=10_000)
    lengths = sample_lengths([prediction] * 4000, num_scenarios=2, rng=np.random.default_rng(3))
    assert lengths.shape == (2, 4000)
    assert (lengths == 10_000).mean() == pytest.approx(0.25, abs=0.03)
    assert np.median(lengths[lengths < 10_000]) == pytest.approx(200, rel=0.05)


@settings(max_examples=40, deadline=None)
@given(
    mean_log=st.floats(-5, 2000),
    sd_log=st.floats(0, 5),
    cap_share=st.floats(0, 1),
    cap=st.integers(1, 50),
    seed=st.integers(0, 2**31),
)
def test_samples_stay_between_one_and_the_cap_and_depend_on_the_seed_alone(
    mean_log: float, sd_log: float, cap_share: float, cap: int, seed: int
) -> None:
    prediction = LengthPrediction(mean_log=mean_log, sd_log=sd_log, cap_share=cap_share, cap_tokens=cap)
    first, second = (
        sample_lengths([prediction] * 5, num_scenarios=2, rng=np.random.default_rng(seed)) for _ in range(2)
    )
    assert first.min() >= 1
    assert first.max() <= cap
    assert np.array_equal(first, second)
