"""Signals that end a run.

SIGTERM (`kill`, a job's hard end) and SIGINT end it at once, in order: the ledger is closed, nothing that the
run started is left. SIGUSR1 says that time runs out: the run gives up what it is drawing, or completes the
training of a step that is drawn, has the trainer save what the completed steps made, and ends with exit code
STOPPED.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

STOPPED = 75
"""Exit code of a run that saved its state before its last step; EX_TEMPFAIL of sysexits.h."""

_SAVE = signal.SIGUSR1
_END = signal.SIGTERM


class StopRequested(KeyboardInterrupt):
    """SIGUSR1. A KeyboardInterrupt, because an event loop lets only those through to its caller."""


class StopSignals:
    """Installs the handlers for the time of the block. Must be entered in the main thread."""

    def __init__(self) -> None:
        self._is_requested = False
        self._is_ending = False
        self._may_interrupt = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number, handler in ((_SAVE, self._on_save), (_END, self._on_end)):
            self._previous[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raise StopRequested when the signal has come."""
        if self._is_requested:
            raise StopRequested

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """The signal raises StopRequested anywhere in the block; elsewhere it waits for the next check."""
        self._may_interrupt = True
        try:
            self.check()
            yield
        finally:
            self._may_interrupt = False

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        is_first = not self._is_requested
        self._is_requested = True
        # Once only: a second one must not break off what the first one's handling does.
        if self._may_interrupt and is_first:
            raise StopRequested

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        # Once, too: at a cancel SLURM signals every process of the job, and the batch script forwards it.
        if not self._is_ending:
            self._is_ending = True
            raise KeyboardInterrupt
