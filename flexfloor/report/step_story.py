"""Who worked on what, and when, in one rollout step: what its ledger tells without the tokens.

Times are seconds since the step began. A step that was interrupted and resumed is shown from its restart on:
the driver's figures of it begin there too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import msgspec

from flexfloor.errors import LedgerError
from flexfloor.ledger_file import frames, step_path
from flexfloor.records import Aborted, Finished, StepOpened, Submitted
from flexfloor.schedule_record import StepSchedule
from flexfloor.types import FinishReason

LEDGER_FOLDER = "ledger"
_RESTART_SLACK_S = 2.0
"""A ledger may span that much more than its step's wall time before the step counts as resumed."""


class _Progress(msgspec.Struct, frozen=True, array_like=True, tag="tok"):
    """`flexfloor.records.Progress` without its tokens: they are most of a ledger, and not wanted here."""

    response_id: str
    attempt: int


_Record = StepOpened | Submitted | _Progress | Finished | Aborted
_decoder: msgspec.msgpack.Decoder[_Record] = msgspec.msgpack.Decoder(_Record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A response on a rank, from its submission to its end there."""

    response_id: str
    prompt_id: str
    dp_rank: int
    number: int
    from_s: float
    to_s: float
    num_tokens: int | None
    """Of the response at the attempt's end; None while it runs."""
    is_truncated: bool = False
    aborted_because: str | None = None
    is_moved: bool = False
    """Ended by a planned move, not lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A response that went on elsewhere: a planned move, or an attempt that was lost."""

    response_id: str
    source: int
    target: int
    left_s: float
    arrived_s: float
    num_tokens: int
    is_planned: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStory:
    """The attempts of a step in order of submission."""

    rollout_step: int
    num_ranks: int
    wall_s: float
    attempts: tuple[Attempt, ...]
    is_resumed: bool = False

    @property
    def lengths_tokens(self) -> Mapping[str, tuple[int, ...]]:
        """Lengths of the finished responses by prompt_id."""
        lengths: dict[str, list[int]] = {}
        for attempt in self.finished:
            lengths.setdefault(attempt.prompt_id, []).append(attempt.num_tokens or 0)
        return MappingProxyType({prompt: tuple(values) for prompt, values in lengths.items()})

    @property
    def finished(self) -> Sequence[Attempt]:
        return [a for a in self.attempts if a.num_tokens is not None and a.aborted_because is None]

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Every attempt that was continued on another rank."""
        last: dict[str, Attempt] = {}
        hops: list[Hop] = []
        for attempt in self.attempts:
            before = last.get(attempt.response_id)
            if before is not None and before.dp_rank != attempt.dp_rank:
                hops.append(_hop(before, attempt))
            last[attempt.response_id] = attempt
        return tuple(hops)


def read_story(
    run_dir: Path, rollout_step: int, *, num_ranks: int, schedule: StepSchedule | None
) -> StepStory:
    """The story in a step's ledger; a torn end is left out. LedgerError names a damaged file."""
    path = step_path(run_dir / LEDGER_FOLDER, rollout_step)
    records = (_read(payload, path) for _, payload in frames(path.read_bytes(), path))
    story = tell(records, rollout_step=rollout_step, num_ranks=num_ranks)
    return story if schedule is None else from_restart(story, schedule.wall_s)


def tell(
    records: Iterable[_Record],
    *,
    rollout_step: int,
    num_ranks: int = 0,
) -> StepStory:
    """Fold a ledger's records. The group is at least as large as the ranks that appear."""
    attempts: dict[tuple[str, int], Attempt] = {}
    latest_s = 0.0
    for record in records:
        match record:
            case Submitted():
                # The machine was restarted in between, and its clock with it.
                if record.at_s < latest_s - _RESTART_SLACK_S:
                    attempts.clear()
                latest_s = record.at_s
                attempts[record.response_id, record.attempt] = _begun(record)
            case Finished():
                latest_s = record.finished_at_s
                _end(attempts, record, latest_s, is_truncated=record.finish_reason is FinishReason.length)
            case Aborted():
                latest_s = record.at_s
                is_moved = record.moved_to is not None
                _end(attempts, record, latest_s, aborted_because=record.reason, is_moved=is_moved)
    return _since_start(list(attempts.values()), latest_s, rollout_step, num_ranks)


def from_restart(story: StepStory, wall_s: float) -> StepStory:
    """The last `wall_s` of a story that spans clearly more than that; else the story, to `wall_s`."""
    shift_s = story.wall_s - wall_s
    if shift_s <= _RESTART_SLACK_S:
        return replace(story, wall_s=max(story.wall_s, wall_s))
    kept = [
        replace(attempt, from_s=max(0.0, attempt.from_s - shift_s), to_s=attempt.to_s - shift_s)
        for attempt in story.attempts
        if attempt.to_s > shift_s
    ]
    return replace(story, attempts=tuple(kept), wall_s=wall_s, is_resumed=True)


def running_counts(attempts: Iterable[Attempt]) -> list[tuple[float, int]]:
    """How many run from when on: `(time, count)` in order of time, one entry a time."""
    changes: dict[float, int] = {}
    for attempt in attempts:
        changes[attempt.from_s] = changes.get(attempt.from_s, 0) + 1
        changes[attempt.to_s] = changes.get(attempt.to_s, 0) - 1
    count, counts = 0, []
    for at_s in sorted(changes):
        count += changes[at_s]
        counts.append((at_s, count))
    return counts


def _read(payload: bytes, path: Path) -> _Record:
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise LedgerError(f"{path}: a record cannot be read: {error}") from error


def _begun(record: Submitted) -> Attempt:
    return Attempt(
        response_id=record.response_id,
        prompt_id=record.prompt_id,
        dp_rank=record.dp_rank,
        number=record.attempt,
        from_s=record.at_s,
        to_s=float("inf"),
        num_tokens=None,
    )


def _end(
    attempts: dict[tuple[str, int], Attempt],
    record: Finished | Aborted,
    at_s: float,
    *,
    is_truncated: bool = False,
    aborted_because: str | None = None,
    is_moved: bool = False,
) -> None:
    key = (record.response_id, record.attempt)
    # Of an attempt before the machine's restart nothing is kept.
    if key in attempts:
        attempts[key] = replace(
            attempts[key],
            to_s=at_s,
            num_tokens=record.num_tokens,
            is_truncated=is_truncated,
            aborted_because=aborted_because,
            is_moved=is_moved,
        )


def _since_start(attempts: list[Attempt], end_s: float, rollout_step: int, num_ranks: int) -> StepStory:
    start_s = min((attempt.from_s for attempt in attempts), default=end_s)
    num_ranks = max(num_ranks, 1, *(attempt.dp_rank + 1 for attempt in attempts))
    moved = [replace(a, from_s=a.from_s - start_s, to_s=min(a.to_s, end_s) - start_s) for a in attempts]
    return StepStory(
        rollout_step=rollout_step, num_ranks=num_ranks, wall_s=end_s - start_s, attempts=tuple(moved)
    )


def _hop(before: Attempt, after: Attempt) -> Hop:
    return Hop(
        response_id=after.response_id,
        source=before.dp_rank,
        target=after.dp_rank,
        left_s=before.to_s,
        arrived_s=after.from_s,
        num_tokens=before.num_tokens or 0,
        is_planned=before.is_moved,
        reason=before.aborted_because or "",
    )
