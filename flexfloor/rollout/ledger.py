"""The ledger: every response of one rollout step in an append-only file that survives a crash.

The format stands in `flexfloor.ledger_file`. A torn last frame (a crash) is left aside and reported by how
many bytes it left; opening for append cuts them off. Any other damage raises LedgerError.

Durability: each record goes to the operating system in one write(2) before `append` returns, so a killed
process loses nothing. fsync comes at `sync` and `close` only: on a busy disk it may block for seconds, which
the rollout's event loop cannot afford. A power cut loses at most what the kernel had not written back; those
responses are continued or drawn again under their own seeds.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from flexfloor.errors import LedgerError
from flexfloor.ledger_file import MAGIC, framed, frames, step_path
from flexfloor.records import LEDGER_FORMAT_VERSION, LedgerRecord, StepOpened
from flexfloor.rollout.step_state import StepState

__all__ = ["Ledger", "LedgerContents", "read_ledger", "step_path"]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LedgerRecord).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerContents:
    """What reading a ledger gave: the folded state, and the torn tail that was left aside."""

    state: StepState
    num_records: int
    good_bytes: int
    """The file up to and with the last whole record."""
    torn_bytes: int
    """Bytes after it; 0 unless a crash cut a record."""


def read_ledger(path: Path) -> LedgerContents:
    """Read and fold a whole ledger. A torn last record is left aside and reported.

    Raises LedgerError for damage in the middle and for records that contradict each other, StaleWeightsError
    for a response of another weight_version than the step's.
    """
    data = path.read_bytes()
    state, num_records = StepState(), 0
    good_bytes = len(MAGIC) if data.startswith(MAGIC) else 0
    for end_bytes, payload in frames(data, path):
        state.apply(_record(payload, good_bytes, path))
        good_bytes = end_bytes
        num_records += 1
    _check_format(state.opened, path)
    return LedgerContents(
        state=state, num_records=num_records, good_bytes=good_bytes, torn_bytes=len(data) - good_bytes
    )


class Ledger:
    """The open ledger of a running step. One writer; `append` folds the record into `state` and writes it."""

    def __init__(self, path: Path, descriptor: int, state: StepState) -> None:
        self.path = path
        self.state = state
        self._descriptor = descriptor

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        rollout_step: int,
        weight_version: int,
        num_responses: int,
        weight_checksum: str = "",
    ) -> Self:
        """Create the step's ledger, or go on with the one that an interrupted run left.

        Raises LedgerError where the file belongs to another step, weight_version, number of responses, or,
        where both are known, to weights of another checksum.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        contents = read_ledger(path) if path.exists() else None
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        ledger = cls(path, descriptor, contents.state if contents else StepState())
        wanted = StepOpened(
            LEDGER_FORMAT_VERSION,
            rollout_step,
            weight_version,
            num_responses,
            time.monotonic(),
            time.time(),
            weight_checksum,
        )
        try:
            ledger._begin(contents.good_bytes if contents else 0, wanted)
        except BaseException:
            os.close(descriptor)
            raise
        return ledger

    def append(self, record: LedgerRecord) -> bool:
        """Fold the record into `state` and write it. False: duplicate or late, so not written."""
        if not self.state.apply(record):
            return False
        self._write(framed(_encode(record)))
        return True

    def sync(self) -> None:
        """Make everything appended so far survive a power cut."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            self.sync()
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, good_bytes: int, wanted: StepOpened) -> None:
        os.ftruncate(self._descriptor, good_bytes)
        os.lseek(self._descriptor, good_bytes, os.SEEK_SET)
        if good_bytes == 0:
            self._write(MAGIC)
        if self.state.opened is None:
            self.append(wanted)
        found = self.state.opened
        assert found is not None, "just appended"
        if _identity(found) != _identity(wanted):
            raise LedgerError(
                f"{self.path} holds (rollout_step, weight_version, num_responses)={_identity(found)}, not "
                f"{_identity(wanted)}"
            )
        checksums = {found.weight_checksum, wanted.weight_checksum} - {""}
        if len(checksums) > 1:
            raise LedgerError(
                f"{self.path} was drawn by weights of checksum {found.weight_checksum}; those of "
                f"weight_version {wanted.weight_version} now have {wanted.weight_checksum}"
            )

    def _write(self, data: bytes) -> None:
        """Raises OSError that names the file; what was half written is a torn tail."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def _record(payload: bytes, offset: int, path: Path) -> LedgerRecord:
    try:
        return _decode(payload)
    except msgspec.DecodeError as error:
        raise LedgerError(f"{path}: the record at byte {offset} cannot be read: {error}") from error


def _check_format(opened: StepOpened | None, path: Path) -> None:
    if opened is not None and opened.format_version != LEDGER_FORMAT_VERSION:
        raise LedgerError(
            f"{path} has ledger format {opened.format_version}; this release reads {LEDGER_FORMAT_VERSION}"
        )


def _identity(opened: StepOpened) -> tuple[int, int, int]:
    return opened.rollout_step, opened.weight_version, opened.num_responses
