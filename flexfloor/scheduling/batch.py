"""Batching: which prompts of a window of rollout steps share a step. PURE: seeded by its arguments.

Every prompt of the window lands in exactly one batch, so it is drawn once a pass and moves by less than the
window's number of steps. A batch holds whole prompt groups. Bucketing is given up, with the reason, where the
predictions do not rank prompts well enough or where the longest prompts together would overfill the KV cache.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexfloor.config.choices import Batching
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.peak_kv import peak_kv_tokens, sample_lengths, start_iterations

_KV_SHARE = 0.8
"""Of the group's KV tokens that a bucket may be predicted to need: one sampled scenario is not the worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """The batches of a window, in the order in which they are rolled out."""

    batches: tuple[tuple[int, ...], ...]
    """Prompt indices, in data order within a batch."""
    reason: str
    """How the window was cut, or why it was left in data order."""
    is_bucketed: bool
    batch_reasons: tuple[str, ...] = ()
    """Per batch, e.g. `bucket 2 of 4, longest first`."""

    def __post_init__(self) -> None:
        if self.batch_reasons and len(self.batch_reasons) != len(self.batches):
            raise ValueError(f"{len(self.batches)} batches, {len(self.batch_reasons)} reasons for them")

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint in mid-window; `from_json` gives the same plan back."""
        return {
            "batches": [list(batch) for batch in self.batches],
            "reason": self.reason,
            "is_bucketed": self.is_bucketed,
            "batch_reasons": list(self.batch_reasons),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "WindowPlan":
        """Raises ValueError where a field is missing or is of another kind."""
        try:
            return cls(
                batches=tuple(tuple(int(index) for index in batch) for batch in data["batches"]),
                reason=str(data["reason"]),
                is_bucketed=bool(data["is_bucketed"]),
                batch_reasons=tuple(str(reason) for reason in data["batch_reasons"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a window plan: {error!r}") from error


def plan_window(
    prompts: Sequence[int],
    *,
    batch_size: int,
    predictions: Callable[[int], LengthPrediction],
    prompt_tokens: Callable[[int], int],
    num_responses_per_prompt: int,
    kv_capacity_tokens: int | None,
    mode: Batching,
    rank_correlation: float | None,
    min_rank_correlation: float,
    seed: int,
    window_index: int,
    running_limit: int | None = None,
) -> WindowPlan:
    """Cut a window into batches of `batch_size` prompts; the last batch may be short.

    `prompts` are indices in data order, as many as the window's steps take. `predictions` and `prompt_tokens`
    are asked by index, and not at all where the window stays in data order for another reason.
    `kv_capacity_tokens` and `running_limit` are of the whole group; None: no bound. `rank_correlation` is
    the predictor's with what came, None without history. `seed` and `window_index` fix every draw.
    Raises ValueError for sizes below 1 and for prompts that occur twice.
    """
    if batch_size < 1 or num_responses_per_prompt < 1:
        raise ValueError(
            f"batch_size={batch_size}, num_responses_per_prompt={num_responses_per_prompt}: at least 1 each"
        )
    if len(set(prompts)) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts, but only {len(set(prompts))} different ones")
    num_batches = -(-len(prompts) // batch_size)
    reason = _why_not(mode, num_batches, rank_correlation, min_rank_correlation)
    if reason:
        return _in_data_order(prompts, batch_size, reason)
    # The seed of a window depends on nothing that a resumed run may lack.
    rng = np.random.default_rng([seed, window_index])
    expected = [predictions(index) for index in prompts]
    longest_first = sorted(range(len(prompts)), key=lambda at: (-expected[at].expected_tokens, at))
    num_dealt = 1
    if kv_capacity_tokens is not None:
        peaks = _bucket_peaks(
            [expected[at] for at in longest_first],
            [prompt_tokens(prompts[at]) for at in longest_first],
            batch_size,
            num_responses_per_prompt,
            running_limit,
            rng,
        )
        room = int(_KV_SHARE * kv_capacity_tokens)
        num_dealt = next((num for num, peak in enumerate(peaks, 1) if peak <= room), num_batches)
        if num_dealt == num_batches:
            need = f"KV: the longest bucket would need {peaks[0]} of {room} tokens"
            reason = f"{need}, and dealing it out takes all {num_batches} batches"
            return _in_data_order(prompts, batch_size, reason)
    return _bucketed(prompts, longest_first, batch_size, num_dealt, rng)


def _why_not(
    mode: Batching, num_batches: int, rank_correlation: float | None, min_rank_correlation: float
) -> str:
    """Why a window stays in data order; empty where it may be bucketed."""
    if mode is Batching.fifo:
        return "fifo"
    if num_batches <= 1:
        return f"a window of {num_batches} step has nothing to sort"
    if rank_correlation is None:
        return "no history: predictions do not rank prompts yet"
    # A NaN correlation compares false and so counts as poor.
    if not rank_correlation >= min_rank_correlation:
        return (
            f"rank correlation {rank_correlation:.2f} of the predictions is below {min_rank_correlation:.2f}"
        )
    return ""


def _in_data_order(prompts: Sequence[int], batch_size: int, reason: str) -> WindowPlan:
    batches = [tuple(prompts[begin : begin + batch_size]) for begin in range(0, len(prompts), batch_size)]
    return WindowPlan(
        batches=tuple(batches), reason=reason, is_bucketed=False, batch_reasons=(reason,) * len(batches)
    )


def _bucketed(
    prompts: Sequence[int],
    longest_first: Sequence[int],
    batch_size: int,
    num_dealt: int,
    rng: np.random.Generator,
) -> WindowPlan:
    num_batches = -(-len(prompts) // batch_size)
    turn_of = rng.permutation(num_batches)
    # The step that comes last may be short, so which bucket is short is drawn and not always the same end.
    widths = np.full(num_batches, batch_size)
    widths[np.flatnonzero(turn_of == num_batches - 1)] = len(prompts) - batch_size * (num_batches - 1)
    places = np.array(longest_first)
    num_top = int(widths[:num_dealt].sum())
    if num_dealt > 1:
        places[:num_top] = rng.permutation(places[:num_top])
    buckets = np.split(places, np.cumsum(widths)[:-1])
    batches, reasons = [()] * num_batches, [""] * num_batches
    for bucket, turn in enumerate(turn_of):
        batches[turn] = tuple(prompts[at] for at in sorted(buckets[bucket]))
        reasons[turn] = f"bucket {bucket + 1} of {num_batches}, longest first"
        if num_dealt > 1 and bucket < num_dealt:
            reasons[turn] += f"; the {num_dealt} longest are dealt together for their KV"
    return WindowPlan(
        batches=tuple(batches),
        reason=_cut(num_batches, num_dealt),
        is_bucketed=True,
        batch_reasons=tuple(reasons),
    )


def _cut(num_batches: int, num_dealt: int) -> str:
    cut = f"{num_batches} buckets by predicted length"
    if num_dealt > 1:
        cut += f"; the {num_dealt} longest dealt together, for one alone would overfill the KV cache"
    return cut


def _bucket_peaks(
    predictions: Sequence[LengthPrediction],
    prompt_tokens: Sequence[int],
    batch_size: int,
    num_responses_per_prompt: int,
    running_limit: int | None,
    rng: np.random.Generator,
) -> list[int]:
    """KV peak of a batch when the g longest buckets are dealt among each other, for g = 1, 2, ..

    Taken as a batch's share of the peak of their union: dealt at random they have like peaks at like times.
    Prompts come longest first.
    """
    responses = [prediction for prediction in predictions for _ in range(num_responses_per_prompt)]
    lengths = sample_lengths(responses, num_scenarios=1, rng=rng)
    prompts = np.repeat(np.array(prompt_tokens, dtype=np.int64), num_responses_per_prompt)
    num_batches = -(-len(predictions) // batch_size)
    peaks = []
    for num_dealt in range(1, num_batches + 1):
        end = num_dealt * batch_size * num_responses_per_prompt
        part, ranks = lengths[:, :end], np.zeros(len(prompts[:end]), dtype=np.int64)
        limit = None if running_limit is None else running_limit * num_dealt
        starts = start_iterations(part, ranks, num_ranks=1, running_limit=limit)
        peak = peak_kv_tokens(part, starts, prompt_tokens=prompts[:end], ranks=ranks, num_ranks=1)
        share = min(1.0, batch_size * num_responses_per_prompt / part.shape[1])
        peaks.append(math.ceil(int(peak[0, 0]) * share))
    return peaks
