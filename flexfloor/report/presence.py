"""When each worker was in the group, and what it did there. PURE."""

from collections.abc import Sequence
from dataclasses import dataclass

from flexfloor.report.step_story import Attempt, StepStory, running_counts
from flexfloor.schedule_record import StepSchedule

Span = tuple[float, float]
"""From and to, seconds since the step began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStory:
    """One row of a timeline."""

    dp_rank: int
    in_group: tuple[Span, ...]
    own_work: tuple[Span, ...]
    """Spans in which it had unfinished responses of its own."""
    counts: tuple[tuple[float, int], ...]
    """How many of them, from when on."""
    num_responses: int
    """Those that it finished."""

    @property
    def occupied_s(self) -> float:
        return sum(to_s - from_s for from_s, to_s in self.in_group)

    @property
    def serving_s(self) -> float:
        """In the group, only serving its experts to the others."""
        busy_s = sum(_overlap(span, work) for span in self.in_group for work in self.own_work)
        return self.occupied_s - busy_s


def worker_stories(story: StepStory, schedule: StepSchedule | None) -> list[WorkerStory]:
    """One a rank. Without a schedule nobody is known to have been away."""
    by_rank: list[list[Attempt]] = [[] for _ in range(story.num_ranks)]
    for attempt in story.attempts:
        by_rank[attempt.dp_rank].append(attempt)
    return [_worker(rank, own, story.wall_s, schedule) for rank, own in enumerate(by_rank)]


def _worker(rank: int, own: Sequence[Attempt], wall_s: float, schedule: StepSchedule | None) -> WorkerStory:
    counts = running_counts(own)
    return WorkerStory(
        dp_rank=rank,
        in_group=_complement(_absent(rank, own, wall_s, schedule), wall_s),
        own_work=_positive(counts),
        counts=tuple(counts),
        num_responses=sum(a.num_tokens is not None and a.aborted_because is None for a in own),
    )


def _absent(rank: int, own: Sequence[Attempt], wall_s: float, schedule: StepSchedule | None) -> list[Span]:
    if schedule is None:
        return []
    spans = [
        (absence.from_s, wall_s if absence.to_s is None else absence.to_s)
        for absence in schedule.absences
        if absence.dp_rank == rank
    ]
    starts_away = schedule.starting_members and rank not in schedule.starting_members
    if starts_away and not any(from_s <= 0.0 for from_s, _ in spans):
        # A schedule names the starting members always, their absence perhaps not.
        spans.append((0.0, min((a.from_s for a in own), default=min((s for s, _ in spans), default=wall_s))))
    return sorted(spans)


def _complement(spans: Sequence[Span], wall_s: float) -> tuple[Span, ...]:
    rest, at_s = [], 0.0
    for from_s, to_s in spans:
        if from_s > at_s:
            rest.append((at_s, min(from_s, wall_s)))
        at_s = max(at_s, to_s)
    if at_s < wall_s:
        rest.append((at_s, wall_s))
    return tuple(rest)


def _positive(counts: Sequence[tuple[float, int]]) -> tuple[Span, ...]:
    spans, since_s = [], None
    for at_s, count in counts:
        if count and since_s is None:
            since_s = at_s
        elif not count and since_s is not None:
            spans.append((since_s, at_s))
            since_s = None
    return tuple(spans)


def _overlap(left: Span, right: Span) -> float:
    return max(0.0, min(left[1], right[1]) - max(left[0], right[0]))
