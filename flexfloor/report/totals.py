"""A run in numbers: sums over its steps, beside what they would have been if nobody had left. PURE."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexfloor.report.run_data import RunData

LAST_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums and shares over the steps on record; None where a number is not there.

    The wall time is that of the rollout phases alone. Iterations of the group are those of the worker that
    took part in most.
    """

    num_steps: int
    num_tokens: float | None
    wall_s: float | None
    occupied_worker_s: float | None
    worker_iterations: float | None
    group_iterations: float | None
    tail_idle_share: float | None
    reward: float | None
    """Mean of the last steps."""

    @property
    def tokens_per_s(self) -> float | None:
        return _over(self.num_tokens, self.wall_s)

    @property
    def tokens_per_occupied_worker_s(self) -> float | None:
        return _over(self.num_tokens, self.occupied_worker_s)

    @property
    def tokens_per_worker_iteration(self) -> float | None:
        return _over(self.num_tokens, self.worker_iterations)

    @property
    def tokens_per_iteration(self) -> float | None:
        return _over(self.num_tokens, self.group_iterations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What the release policy did; None without schedules."""

    num_switches: int | None
    """Decisions that were carried out."""
    num_refused: int | None
    num_moves: int | None
    num_retractions: int | None


def totals(run: RunData) -> Totals:
    return _totals(run, "occupancy/")


def static_totals(run: RunData) -> Totals:
    """The same steps with every worker in the group to the end: wall time and iterations stay."""
    return _totals(run, "occupancy/static_")


def counts(run: RunData) -> Counts:
    if not run.schedules:
        return Counts(num_switches=None, num_refused=None, num_moves=None, num_retractions=None)
    decisions = [decision for schedule in run.schedules.values() for decision in schedule.decisions]
    done = [decision for decision in decisions if decision.outcome == "done"]
    return Counts(
        num_switches=len(done),
        num_refused=len(decisions) - len(done),
        num_moves=sum(len(decision.moves) for decision in done),
        num_retractions=sum(schedule.num_retractions for schedule in run.schedules.values()),
    )


def metric_points(run: RunData, name: str) -> list[tuple[float, float]]:
    """`(rollout_step, value)` of the steps that have it."""
    return [(float(r["rollout_step"]), float(r[name])) for r in run.metrics if r.get(name) is not None]


def metric_means(run: RunData) -> dict[str, float]:
    """Mean of every metric over the steps that have it."""
    names = {name for record in run.metrics for name in record if name != "rollout_step"}
    means = {name: _mean(run.metrics, name) for name in sorted(names)}
    return {name: mean for name, mean in means.items() if mean is not None}


def ratio(value: float | None, first: float | None) -> float | None:
    return _over(value, first)


def _totals(run: RunData, prefix: str) -> Totals:
    records, last = run.metrics, run.metrics[-LAST_STEPS:]
    num_ranks = _num_ranks(run)
    group = _sum(records, lambda record: _number(record, "occupancy/static_worker_iterations"))
    return Totals(
        num_steps=len(records),
        num_tokens=_sum(records, lambda record: _number(record, "occupancy/num_tokens")),
        wall_s=_sum(records, _wall_s),
        occupied_worker_s=_sum(records, lambda record: _number(record, f"{prefix}occupied_worker_s")),
        worker_iterations=_sum(records, lambda record: _number(record, f"{prefix}worker_iterations")),
        group_iterations=group / num_ranks if group and num_ranks else None,
        tail_idle_share=_weighted(records, f"{prefix}tail_idle_share", f"{prefix}occupied_worker_s"),
        reward=_mean(last, "reward/mean"),
    )


def _num_ranks(run: RunData) -> int:
    told = run.config.get("rollout.ep_size", "")
    sizes = [schedule.num_ranks for schedule in run.schedules.values()]
    return int(told) if told.isdigit() else max(sizes, default=0)


def _wall_s(record: Mapping[str, Any]) -> float | None:
    return _over(
        _number(record, "occupancy/num_tokens"), _number(record, "occupancy/throughput_tokens_per_s")
    )


def _number(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    return None if value is None else float(value)


def _sum(
    records: Sequence[Mapping[str, Any]], of: Callable[[Mapping[str, Any]], float | None]
) -> float | None:
    """None where a step lacks the number: a sum over fewer steps would not compare with the others."""
    values = [of(record) for record in records]
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _mean(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [value for record in records if (value := _number(record, name)) is not None]
    return sum(values) / len(values) if values else None


def _weighted(records: Sequence[Mapping[str, Any]], name: str, by: str) -> float | None:
    pairs = [(_number(record, name), _number(record, by)) for record in records]
    known = [(value, weight) for value, weight in pairs if value is not None and weight is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _over(amount: float | None, of: float | None) -> float | None:
    return None if amount is None or not of else amount / of
