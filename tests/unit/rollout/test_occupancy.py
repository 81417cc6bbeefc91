"""Occupancy figures by hand, and what must hold for any step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfloor.rollout.occupancy import length_stats, measure
from flexfloor.types import EngineCounters, FinishReason, Response


def response(
    dp_rank: int, finished_at_s: float, num_tokens: int, reason: FinishReason = FinishReason.stop
) -> Response:
    return Response(
        response_id=f"0/{dp_rank}/{finished_at_s}",
        rollout_step=0,
        prompt_id="p",
        sample_index=0,
        prompt_token_ids=(1,),
        token_ids=(1,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        dp_rank=dp_rank,
        weight_version=0,
        finish_reason=reason,
        cap_tokens=99,
        started_at_s=100.0,
        finished_at_s=finished_at_s,
    )


STEP = [
    response(0, 110.0, 40, FinishReason.length),
    response(0, 104.0, 10),
    response(1, 105.0, 20),
    response(2, 102.0, 10),
]


def test_a_static_step_by_hand() -> None:
    figures = measure(STEP, started_at_s=100.0, finished_at_s=110.0, num_ranks=4)
    assert figures.num_tokens == 80
    assert figures.occupied_worker_s == 40.0
    assert figures.tail_idle_share == pytest.approx(1 - (1.0 + 0.5 + 0.2 + 0.0) / 4)
    assert figures.tokens_per_occupied_worker_s == 2.0
    assert figures.tokens_per_s == 8.0
    assert figures.truncated_share == 0.25
    assert figures.responses_per_rank == (2, 1, 1, 0)
    assert figures.tokens_per_rank == (50, 20, 10, 0)
    assert figures.iterations is None


def test_workers_that_leave_early_stop_counting() -> None:
    figures = measure(
        STEP, started_at_s=100.0, finished_at_s=110.0, num_ranks=4, left_at_s={1: 106.0, 2: 102.0, 3: 101.0}
    )
    assert figures.occupied_worker_s == 10.0 + 6.0 + 2.0 + 1.0
    assert figures.tail_idle_share == pytest.approx(1 - (10.0 + 5.0 + 2.0 + 0.0) / 19.0)
    assert figures.tokens_per_s == 8.0
    # As if they had stayed.
    assert figures.static_occupied_worker_s == 40.0
    assert figures.static_tail_idle_share == pytest.approx(1 - (10.0 + 5.0 + 2.0 + 0.0) / 40.0)


def test_news_of_a_release_after_the_last_response_adds_no_time() -> None:
    late = measure(STEP, started_at_s=100.0, finished_at_s=110.0, num_ranks=4, left_at_s={3: 110.5})
    assert late == measure(STEP, started_at_s=100.0, finished_at_s=110.0, num_ranks=4)


def test_a_rank_that_left_unknown_to_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[4\] are outside a group of 4"):
        measure(STEP, started_at_s=100.0, finished_at_s=110.0, num_ranks=4, left_at_s={4: 101.0})


def test_worker_iterations_are_differences_of_the_counters() -> None:
    before = EngineCounters(
        num_iterations=(100, 100), num_prefill_iterations=(10, 10), num_idle_iterations=(5, 50)
    )
    after = EngineCounters(
        num_iterations=(140, 140), num_prefill_iterations=(12, 12), num_idle_iterations=(5, 80)
    )
    iterations = measure(
        [response(0, 110.0, 40)],
        started_at_s=100.0,
        finished_at_s=110.0,
        num_ranks=2,
        counters_before=before,
        counters_after=after,
    ).iterations
    assert iterations is not None
    assert iterations.worker_iterations == 80
    assert iterations.idle_worker_iterations == 30
    assert iterations.prefill_worker_iterations == 4
    assert iterations.tokens_per_worker_iteration == 0.5
    assert iterations.static_worker_iterations == 80


def test_a_static_group_would_have_iterated_as_long_as_its_busiest_rank() -> None:
    before = EngineCounters(
        num_iterations=(100, 90, 50), num_prefill_iterations=(0,) * 3, num_idle_iterations=(0,) * 3
    )
    after = EngineCounters(
        num_iterations=(140, 110, 60), num_prefill_iterations=(0,) * 3, num_idle_iterations=(0,) * 3
    )
    iterations = measure(
        [response(0, 110.0, 35)],
        started_at_s=100.0,
        finished_at_s=110.0,
        num_ranks=3,
        counters_before=before,
        counters_after=after,
    ).iterations
    assert iterations is not None
    assert (iterations.worker_iterations, iterations.static_worker_iterations) == (40 + 20 + 10, 3 * 40)
    assert iterations.tokens_per_worker_iteration == 0.5


def test_responses_from_before_a_restart_keep_nobody_busy() -> None:
    figures = measure(
        [response(0, 90.0, 5), response(1, 110.0, 5)], started_at_s=100.0, finished_at_s=110.0, num_ranks=2
    )
    assert figures.tail_idle_share == 0.5


def test_length_statistics_interpolate() -> None:
    stats = length_stats([1, 2, 3, 4, 100])
    assert (stats.mean_tokens, stats.median_tokens, stats.max_tokens) == (22.0, 3.0, 100)
    assert stats.p90_tokens == pytest.approx(4 + 0.6 * 96)
    assert stats.p99_tokens == pytest.approx(4 + 0.96 * 96)
    assert stats.p99_over_median == pytest.approx((4 + 0.96 * 96) / 3)


@pytest.mark.parametrize(
    ("responses", "finished_at_s", "num_ranks", "message"),
    [
        ([], 110.0, 4, "without responses"),
        (STEP, 100.0, 4, "not after its start"),
        (STEP, 110.0, 2, r"\[2\] are outside a group of 2"),
    ],
)
def test_impossible_steps_are_refused(
    responses: list[Response], finished_at_s: float, num_ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        measure(responses, started_at_s=100.0, finished_at_s=finished_at_s, num_ranks=num_ranks)


@given(
    work=st.lists(
        st.tuples(st.integers(0, 3), st.floats(0.1, 50), st.integers(1, 30)), min_size=1, max_size=20
    ),
    left=st.dictionaries(st.integers(0, 3), st.floats(0.5, 60)),
)
def test_any_step_is_consistent(work: list[tuple[int, float, int]], left: dict[int, float]) -> None:
    responses = [response(rank, 100.0 + after_s, tokens) for rank, after_s, tokens in work]
    end_s = 100.0 + max(50.0, *(after_s for _, after_s, _ in work))
    static = measure(responses, started_at_s=100.0, finished_at_s=end_s, num_ranks=4)
    elastic = measure(
        responses,
        started_at_s=100.0,
        finished_at_s=end_s,
        num_ranks=4,
        left_at_s={rank: 100.0 + after_s for rank, after_s in left.items()},
    )
    assert -1e-9 <= elastic.tail_idle_share <= 1
    assert elastic.occupied_worker_s <= static.occupied_worker_s + 1e-9
    assert elastic.tokens_per_occupied_worker_s >= static.tokens_per_occupied_worker_s - 1e-9
    assert elastic.static_occupied_worker_s == static.occupied_worker_s == static.static_occupied_worker_s
    assert static.static_tail_idle_share == static.tail_idle_share
    assert elastic.static_tail_idle_share >= elastic.tail_idle_share - 1e-9
    assert sum(static.tokens_per_rank) == static.num_tokens
    assert sum(static.responses_per_rank) == static.num_responses
    assert static.tokens_per_occupied_worker_s == pytest.approx(static.tokens_per_s / 4)
    assert static.lengths.median_tokens <= static.lengths.p90_tokens <= static.lengths.p99_tokens
