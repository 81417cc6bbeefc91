"""Which prompts of a window share a rollout step, by values and by property."""

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.config.choices import Batching
from flexfloor.scheduling.batch import WindowPlan, plan_window
from flexfloor.scheduling.lengths import LengthPrediction

LENGTHS = [10, 900, 20, 800, 30, 700, 40, 600]


def exactly(num_tokens: int) -> LengthPrediction:
    return LengthPrediction(mean_log=math.log(num_tokens), sd_log=0.0, cap_share=0.0, cap_tokens=100_000)


def plan(lengths: list[int] = LENGTHS, first: int = 0, **changes: Any) -> WindowPlan:
    """Prompts `first`, `first + 1`, .. with those lengths."""
    arguments: dict[str, Any] = {
        "batch_size": 2,
        "predictions": lambda index: exactly(lengths[index - first]),
        "prompt_tokens": lambda index: 5,
        "num_responses_per_prompt": 4,
        "kv_capacity_tokens": None,
        "mode": Batching.length_bucketed,
        "rank_correlation": 0.8,
        "min_rank_correlation": 0.3,
        "seed": 7,
        "window_index": 0,
    }
    return plan_window(range(first, first + len(lengths)), **{**arguments, **changes})


def test_prompts_of_like_length_share_a_batch_in_data_order() -> None:
    planned = plan()
    assert sorted(planned.batches) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert planned.is_bucketed
    assert planned.reason == "4 buckets by predicted length"
    longest = planned.batches.index((1, 3))
    assert planned.batch_reasons[longest] == "bucket 1 of 4, longest first"


def test_the_order_of_buckets_is_drawn_by_seed_and_window() -> None:
    orders = {plan(seed=seed, window_index=window).batches for seed in range(4) for window in range(4)}
    assert len(orders) > 6
    assert plan(seed=3, window_index=2) == plan(seed=3, window_index=2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": Batching.fifo}, "fifo"),
        ({"rank_correlation": None}, "no history: predictions do not rank prompts yet"),
        ({"rank_correlation": 0.29}, "rank correlation 0.29 of the predictions is below 0.30"),
        ({"rank_correlation": math.nan}, "rank correlation nan of the predictions is below 0.30"),
        ({"batch_size": 8}, "a window of 1 step has nothing to sort"),
    ],
)
def test_a_window_stays_in_data_order_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    def nothing(_: int) -> LengthPrediction:
        raise AssertionError("the predictions are not needed")

    planned = plan(**changes, predictions=nothing)
    assert [index for batch in planned.batches for index in batch] == list(range(8))
    assert {len(batch) for batch in planned.batches} == {changes.get("batch_size", 2)}
    assert (planned.is_bucketed, planned.reason) == (False, reason)
    assert planned.batch_reasons == (reason,) * len(planned.batches)


def test_buckets_that_overfill_the_kv_cache_are_dealt_together() -> None:
    # The bucket of 900 and 800 peaks when 800 ends, 8 x (800 + 5) = 6440 tokens; with that of 700 and 600
    # it peaks at 600, 16 x 605, half of which a batch holds: 4840.
    alone = plan(kv_capacity_tokens=math.ceil(6440 / 0.8))
    assert (1, 3) in alone.batches
    dealt = [plan(kv_capacity_tokens=math.ceil(4840 / 0.8), seed=seed) for seed in range(12)]
    for planned in dealt:
        assert planned.reason.endswith(
            "the 2 longest dealt together, for one alone would overfill the KV cache"
        )
        assert sorted(planned.batches)[0] == (0, 2)
        assert (4, 6) in planned.batches
    top = {batch for planned in dealt for batch in planned.batches} - {(0, 2), (4, 6)}
    assert top == {(1, 3), (5, 7), (1, 5), (3, 7), (1, 7), (3, 5)}
    assert plan(kv_capacity_tokens=math.ceil(4840 / 0.8) - 1).reason != dealt[0].reason


def test_a_window_that_must_be_dealt_out_whole_is_not_bucketed() -> None:
    planned = plan(kv_capacity_tokens=1000)
    assert planned.batches == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert not planned.is_bucketed
    assert planned.reason == (
        "KV: the longest bucket would need 6440 of 800 tokens, and dealing it out takes all 4 batches"
    )


def test_a_running_limit_lowers_the_need_for_kv() -> None:
    tight: dict[str, Any] = {"kv_capacity_tokens": math.ceil(2 * 905 / 0.8)}
    assert not plan(**tight).is_bucketed
    assert plan(**tight, running_limit=2).is_bucketed


def test_the_short_batch_comes_last_and_is_not_always_of_the_same_bucket() -> None:
    planned = [plan(LENGTHS[:7], seed=seed) for seed in range(20)]
    assert {tuple(len(batch) for batch in one.batches) for one in planned} == {(2, 2, 2, 1)}
    assert len({one.batches[-1] for one in planned}) >= 3


def test_a_plan_survives_json_for_a_resume_in_mid_window() -> None:
    planned = plan(first=1000)
    assert WindowPlan.from_json(json.loads(json.dumps(planned.to_json()))) == planned


@pytest.mark.parametrize(
    "damage", [{"batches": 3}, {"batches": [["x"]]}, {"batch_reasons": ["only one"]}, {"batches": [[None]]}]
)
def test_a_damaged_plan_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"window plan|invalid literal|batches"):
        WindowPlan.from_json({**plan().to_json(), **damage})
    with pytest.raises(ValueError, match="not a window plan: KeyError"):
        WindowPlan.from_json({"batches": []})


def test_impossible_sizes_and_twins_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=0"):
        plan(batch_size=0)
    with pytest.raises(ValueError, match="num_responses_per_prompt=0"):
        plan(num_responses_per_prompt=0)
    with pytest.raises(ValueError, match="2 prompts, but only 1 different"):
        plan_window(
            [4, 4],
            batch_size=1,
            predictions=lambda _: exactly(5),
            prompt_tokens=lambda _: 5,
            num_responses_per_prompt=1,
            kv_capacity_tokens=None,
            mode=Batching.fifo,
            rank_correlation=None,
            min_rank_correlation=0.3,
            seed=0,
            window_index=0,
        )


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 500), max_size=24),
    batch_size=st.integers(1, 7),
    kv=st.integers(1, 20_000) | st.none(),
    limit=st.integers(1, 20) | st.none(),
    seed=st.integers(0, 2**31 - 1),
)
def test_each_prompt_once_in_batches_of_the_given_size_and_like_lengths(
    lengths: list[int], batch_size: int, kv: int | None, limit: int | None, seed: int
) -> None:
    changes = {"batch_size": batch_size, "kv_capacity_tokens": kv, "running_limit": limit, "seed": seed}
    planned = plan(lengths, first=50, **changes)
    indices = [index for batch in planned.batches for index in batch]
    assert sorted(indices) == list(range(50, 50 + len(lengths)))
    num_batches = math.ceil(len(lengths) / batch_size)
    assert [len(batch) for batch in planned.batches[:-1]] == [batch_size] * (num_batches - 1)
    # So a prompt moves by less than the window's number of steps.
    assert len(planned.batches) == num_batches
    assert planned == plan(lengths, first=50, **changes)
    if planned.is_bucketed and "dealt" not in planned.reason:
        spans = sorted(
            (max(found), min(found)) for found in ([lengths[i - 50] for i in b] for b in planned.batches)
        )
        assert all(shorter[0] <= longer[1] for shorter, longer in pairwise(spans))
