"""Reads the ranks' iteration logs as the rows of one rollout step, and keeps them with the run.

Rule 1: a step's records are those between two readings of the counters: record i is iteration i of its rank.
Rule 2: members of an epoch run all its iterations together, so rows line up by their place in the epoch.
A reading may catch ranks one iteration apart; what not all of them ran within the step is left out.
Rule 3: a stored step takes a few bytes an iteration: of the context only what does not follow from one new
token per running response is kept.

A response of L tokens takes 1 prefill and L - 1 decode iterations on its rank, and one decode iteration more
where its last token was an end-of-sequence token or its attempt was aborted, as SGLang's overlap scheduler
has launched that one before it sees the token.
"""

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from flexfloor.errors import FlexfloorError
from flexfloor.iterations import RECORD, StepIterations
from flexfloor.types import EngineCounters

_MAX_SKEW = 1
_US = 1e-6


class IterationLogError(FlexfloorError):
    """A log is shorter than its rank's counters say, or contradicts the logs of the other ranks."""


def log_path(folder: Path, ep_rank: int) -> Path:
    """The log of a rank, as `flexfloor-serve --flexfloor-iteration-log FOLDER` writes it."""
    return folder / f"iterations-rank{ep_rank}.bin"


def iterations_path(run_dir: Path, rollout_step: int) -> Path:
    """Where a run keeps a step's iterations."""
    return run_dir / "iterations" / f"step-{rollout_step:06d}.npz"


def read_step(folder: Path, before: EngineCounters, after: EngineCounters) -> StepIterations:
    """The iterations between two readings of the counters of one server.

    `seconds` of a row is the time from its start to the start of the next one, a switch in between included,
    on the rank of both that saw least of it; the last row repeats the one before it.
    Raises IterationLogError, or OSError where a log cannot be read.
    """
    bounds = zip(before.num_iterations, after.num_iterations, strict=True)
    parts = [_part(log_path(folder, rank), start, stop) for rank, (start, stop) in enumerate(bounds)]
    epochs = sorted({int(epoch) for part in parts for epoch in np.unique(part.epochs)})
    blocks = [_aligned(parts, epoch, is_last=epoch == epochs[-1]) for epoch in epochs]
    empty = np.zeros((0, len(parts)))
    rows = np.concatenate([empty.astype(RECORD), *(records for records, _ in blocks)])
    is_member = np.concatenate([empty.astype(np.bool_), *(members for _, members in blocks)])
    return StepIterations(
        repeats=np.ones(len(rows), np.int64),
        is_member=is_member,
        num_running=rows["num_running"].astype(np.int64),
        context_tokens=rows["context_tokens"].astype(np.int64),
        prefill_tokens=rows["prefill_tokens"].astype(np.int64),
        num_retractions=sum(int(part.records["num_retracted"].sum()) for part in parts),
        seconds=_seconds(rows["took_us"], is_member),
    )


def save_iterations(path: Path, iterations: StepIterations) -> None:
    """Write a recorded step, compressed; the file appears when it is whole.

    ValueError for rows that stand for several iterations.
    """
    if np.any(iterations.repeats != 1):
        raise ValueError("only recorded steps are stored, in which each row is one iteration")
    arrays = {
        "is_member": np.packbits(iterations.is_member.T, axis=1),
        "num_running": _small(np.diff(iterations.num_running, axis=0, prepend=0)),
        "context_rest": _small(
            np.diff(iterations.context_tokens, axis=0, prepend=0) - iterations.num_running
        ),
        "prefill_tokens": _small(iterations.prefill_tokens),
        "num_retractions": np.array(iterations.num_retractions),
        "num_rows": np.array(iterations.num_iterations),
    }
    if iterations.seconds is not None:
        arrays["took_us"] = np.round(iterations.seconds / _US).astype(np.uint32)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    part.replace(path)


def load_iterations(path: Path) -> StepIterations:
    """Read what `save_iterations` wrote; ValueError names a file that is something else."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return _restored(arrays)
    except (KeyError, ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path} does not hold the iterations of a step: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The records of one rank in a step."""

    path: Path
    records: NDArray[np.void]
    first_place: int
    """Place of the first one in its epoch."""

    @property
    def epochs(self) -> NDArray[np.uint32]:
        return self.records["membership_epoch"]

    def of(self, epoch: int) -> tuple[int, NDArray[np.void]]:
        """The place in the epoch of the first record of it, and the records."""
        records = self.records[self.epochs == epoch]
        is_first = len(self.records) > 0 and self.epochs[0] == epoch
        return self.first_place if is_first else 0, records


def _part(path: Path, start: int, stop: int) -> _Part:
    with path.open("rb") as file:
        num_records = path.stat().st_size // RECORD.itemsize
        if not start <= stop <= num_records:
            raise IterationLogError(
                f"{path} has {num_records} records, but the counters go from {start} to {stop}; "
                "is it the log of this server?"
            )
        first_place = start - _epoch_begin(file, start) if start < stop else 0
        file.seek(start * RECORD.itemsize)
        records = np.frombuffer(file.read((stop - start) * RECORD.itemsize), RECORD)
    return _Part(path=path, records=records, first_place=first_place)


def _epoch_begin(file: BinaryIO, index: int) -> int:
    """Index of the first record of the epoch that record `index` is of."""

    def epoch_at(index: int) -> int:
        file.seek(index * RECORD.itemsize)
        return int(np.frombuffer(file.read(RECORD.itemsize), RECORD)["membership_epoch"][0])

    return bisect_left(range(index + 1), epoch_at(index), key=epoch_at)


def _aligned(parts: list[_Part], epoch: int, *, is_last: bool) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
    """([num_rows, num_ranks] records, [num_rows, num_ranks] membership) of one epoch."""
    found = [part.of(epoch) for part in parts]
    spans = {rank: (at, at + len(own)) for rank, (at, own) in enumerate(found) if len(own)}
    starts, stops = zip(*spans.values(), strict=True)
    end_skew = max(stops) - min(stops)
    if max(starts) - min(starts) > _MAX_SKEW or end_skew > (_MAX_SKEW if is_last else 0):
        raise IterationLogError(
            f"the ranks disagree on their iterations of membership_epoch {epoch}, by ep_rank: {spans}"
        )
    num_rows = max(0, min(stops) - max(starts))
    rows = np.zeros((num_rows, len(parts)), RECORD)
    for rank, (start, _) in spans.items():
        skipped = max(starts) - start
        rows[:, rank] = found[rank][1][skipped : skipped + num_rows]
    members = np.isin(np.arange(len(parts)), list(spans))
    return rows, np.tile(members, (num_rows, 1))


def _seconds(took_us: NDArray[np.uint32], is_member: NDArray[np.bool_]) -> NDArray[np.float64] | None:
    """A record tells how long ago the one before it was, so a row's time stands in the next row."""
    if len(took_us) < 2:
        return None
    in_both = is_member[1:] & is_member[:-1]
    # Those who only came with the next row were away, and say how long.
    seen = np.where(in_both.any(axis=1, keepdims=True), in_both, is_member[1:])
    least_us = np.where(seen, took_us[1:], np.iinfo(np.uint32).max).min(axis=1)
    return np.append(least_us, least_us[-1]) * _US


def _small(values: NDArray[np.int64]) -> NDArray[Any]:
    """[num_rows, num_ranks] as [num_ranks, num_rows] in the smallest integers that hold them."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    kinds = (np.int8, np.int16, np.int32, np.int64)
    fitting = next(kind for kind in kinds if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return np.ascontiguousarray(values.T.astype(fitting))


def _restored(arrays: Any) -> StepIterations:
    num_rows = int(arrays["num_rows"])
    num_running = np.cumsum(arrays["num_running"].T, axis=0, dtype=np.int64)
    return StepIterations(
        repeats=np.ones(num_rows, np.int64),
        is_member=np.unpackbits(arrays["is_member"], axis=1, count=num_rows).T.astype(np.bool_),
        num_running=num_running,
        context_tokens=np.cumsum(arrays["context_rest"].T + num_running, axis=0, dtype=np.int64),
        prefill_tokens=arrays["prefill_tokens"].T.astype(np.int64),
        num_retractions=int(arrays["num_retractions"]),
        seconds=arrays["took_us"] * _US if "took_us" in arrays else None,
    )
