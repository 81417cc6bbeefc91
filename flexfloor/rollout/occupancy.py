"""What a rollout step cost: occupied worker time, idle tails, tokens per unit of both. PURE.

Occupied worker time is the sum over workers of (time the worker left the EP group - start of the step); a
worker that never leaves counts to the end. Worker-iterations are the same without the noise of a clock: one
rank in the group for one iteration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from flexfloor.types import EngineCounters, Response


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStats:
    """Response lengths of a step, in tokens. Percentiles interpolate linearly."""

    mean_tokens: float
    median_tokens: float
    p90_tokens: float
    p99_tokens: float
    max_tokens: int
    p99_over_median: float
    """How long the tail is: what a static group waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIterations:
    """A step's worker-iterations, from the server's own counters."""

    worker_iterations: int
    idle_worker_iterations: int
    """Those in which the rank had no tokens of its own and only served its experts."""
    prefill_worker_iterations: int
    tokens_per_worker_iteration: float
    static_worker_iterations: int
    """What a static group would have taken: every rank in every iteration of the rank that had most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Figures of one rollout step of `num_ranks` workers."""

    num_ranks: int
    num_responses: int
    num_tokens: int
    """Response tokens; prompts do not count."""
    wall_s: float
    occupied_worker_s: float
    tail_idle_share: float
    """Share of the occupied worker time after each rank's last own finish; without one the rank was idle."""
    static_occupied_worker_s: float
    """What it would have been if nobody had left."""
    static_tail_idle_share: float
    tokens_per_occupied_worker_s: float
    tokens_per_s: float
    truncated_share: float
    lengths: LengthStats
    responses_per_rank: tuple[int, ...]
    tokens_per_rank: tuple[int, ...]
    iterations: WorkerIterations | None
    """None when the server's counters were not read."""


def measure(
    responses: Sequence[Response],
    *,
    started_at_s: float,
    finished_at_s: float,
    num_ranks: int,
    counters_before: EngineCounters | None = None,
    counters_after: EngineCounters | None = None,
    left_at_s: Mapping[int, float] = MappingProxyType({}),
) -> Occupancy:
    """Figures of a step that ran from `started_at_s` to `finished_at_s`, both on the responses' clock.

    `left_at_s`: when a dp_rank left the group, for those that did not stay to the end. Counters are those of
    just before and just after the step. Raises ValueError for no responses, an end that is not after the
    start, or a dp_rank outside the group.
    """
    _check(responses, started_at_s, finished_at_s, num_ranks, left_at_s)
    # A rank may have left before the first response was sent; news of a release may come after the last.
    ends_s = [
        max(started_at_s, min(left_at_s.get(rank, finished_at_s), finished_at_s)) for rank in range(num_ranks)
    ]
    spans_s = [end_s - started_at_s for end_s in ends_s]
    occupied_worker_s, wall_s = sum(spans_s), finished_at_s - started_at_s
    busy_s = _busy_s(responses, started_at_s, spans_s)
    num_tokens = sum(response.num_tokens for response in responses)
    return Occupancy(
        num_ranks=num_ranks,
        num_responses=len(responses),
        num_tokens=num_tokens,
        wall_s=wall_s,
        occupied_worker_s=occupied_worker_s,
        tail_idle_share=1.0 - sum(busy_s) / occupied_worker_s,
        static_occupied_worker_s=num_ranks * wall_s,
        static_tail_idle_share=1.0 - sum(busy_s) / (num_ranks * wall_s),
        tokens_per_occupied_worker_s=num_tokens / occupied_worker_s,
        tokens_per_s=num_tokens / wall_s,
        truncated_share=sum(response.is_truncated for response in responses) / len(responses),
        lengths=length_stats([response.num_tokens for response in responses]),
        responses_per_rank=_per_rank([(response.dp_rank, 1) for response in responses], num_ranks),
        tokens_per_rank=_per_rank([(r.dp_rank, r.num_tokens) for r in responses], num_ranks),
        iterations=_iterations(counters_before, counters_after, num_tokens),
    )


def length_stats(lengths_tokens: Sequence[int]) -> LengthStats:
    """Statistics of at least one length."""
    median, p90, p99 = (float(value) for value in np.percentile(lengths_tokens, (50, 90, 99)))
    return LengthStats(
        mean_tokens=sum(lengths_tokens) / len(lengths_tokens),
        median_tokens=median,
        p90_tokens=p90,
        p99_tokens=p99,
        max_tokens=max(lengths_tokens),
        p99_over_median=p99 / median if median else float("inf") if p99 else 1.0,
    )


def _check(
    responses: Sequence[Response],
    started_at_s: float,
    finished_at_s: float,
    num_ranks: int,
    left_at_s: Mapping[int, float],
) -> None:
    if not responses:
        raise ValueError("a step without responses has no occupancy")
    if finished_at_s <= started_at_s:
        raise ValueError(f"the step ends at {finished_at_s} s, not after its start at {started_at_s} s")
    strangers = {r.dp_rank for r in responses if not 0 <= r.dp_rank < num_ranks}
    strangers |= {rank for rank in left_at_s if not 0 <= rank < num_ranks}
    if strangers:
        raise ValueError(f"dp_ranks {sorted(strangers)} are outside a group of {num_ranks}")


def _busy_s(responses: Sequence[Response], started_at_s: float, spans_s: Sequence[float]) -> list[float]:
    """Per rank: from the step's start to its last own finish, within the time that it was in the group."""
    busy_s = [0.0] * len(spans_s)
    for response in responses:
        # A resumed step holds responses that finished before it restarted: they kept nobody busy in it.
        own_s = min(response.finished_at_s - started_at_s, spans_s[response.dp_rank])
        busy_s[response.dp_rank] = max(busy_s[response.dp_rank], own_s)
    return busy_s


def _per_rank(amounts: Sequence[tuple[int, int]], num_ranks: int) -> tuple[int, ...]:
    totals = [0] * num_ranks
    for dp_rank, amount in amounts:
        totals[dp_rank] += amount
    return tuple(totals)


def _iterations(
    before: EngineCounters | None, after: EngineCounters | None, num_tokens: int
) -> WorkerIterations | None:
    if before is None or after is None:
        return None
    worker_iterations = sum(after.num_iterations) - sum(before.num_iterations)
    return WorkerIterations(
        worker_iterations=worker_iterations,
        idle_worker_iterations=sum(after.num_idle_iterations) - sum(before.num_idle_iterations),
        prefill_worker_iterations=sum(after.num_prefill_iterations) - sum(before.num_prefill_iterations),
        tokens_per_worker_iteration=num_tokens / worker_iterations if worker_iterations else 0.0,
        static_worker_iterations=len(after.num_iterations)
        * max(b - a for a, b in zip(before.num_iterations, after.num_iterations, strict=True)),
    )
