"""Processes that FlexFloor starts itself: own session, own log file, ended together and on time.

Every child runs in a session of its own, so a Ctrl-C in the terminal reaches only the driver, which then ends
the children in order. A child also gets a parent-death signal from the kernel (Linux), so that it does not
outlive a driver that was killed. What a killed descendant has left behind is known by a mark in its
environment.
"""

import ctypes
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

from flexfloor.errors import ChildProcessError
from flexfloor.left_overs import remove, server_files

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 64 * 1024
_MARK = "FLEXFLOOR_PROCESS_MARK"
"""A path: a child's mark begins with that of the process that started it."""
_GRACE_POLL_S = 0.05


def tail(log_path: Path, num_lines: int = 20) -> str:
    """The last lines of a log file, or a note that there are none."""
    try:
        with log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        lines = []
    return "\n".join(lines[-num_lines:]) or "(it wrote nothing)"


def _die_with_parent(death_signal: signal.Signals, parent_pid: int) -> Callable[[], None] | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)

    def arm() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent died before the signal was armed
            os._exit(1)

    return arm


class ChildProcess:
    """One started process with its descendants.

    Must be started from the main thread: the parent-death signal is tied to the thread that forked.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        parent_death_signal: signal.Signals = signal.SIGTERM,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.name = name
        self._stop_signal = stop_signal
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = log_path.open("ab")
        self._mark = f"{os.environ.get(_MARK, '')}/{secrets.token_hex(8)}"
        self._popen = subprocess.Popen(
            list(argv),
            env={**(os.environ if env is None else env), _MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent(parent_death_signal, os.getpid()),
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        return self._popen.poll()

    def is_alive(self) -> bool:
        return self.exit_code is None

    def check(self) -> None:
        """Raise ChildProcessError with the last log lines if the process has ended."""
        if self.exit_code is not None:
            raise ChildProcessError(
                f"{self.name} (pid {self.pid}) ended with exit code {self.exit_code}. "
                f"Last lines of {self.log_path}:\n{tail(self.log_path)}"
            )

    def descendants(self) -> list[psutil.Process]:
        """Every live process below this one; they may have left its process group, or lost their parent."""
        found = _marked(self._mark)
        with suppress(psutil.NoSuchProcess):
            found |= set(psutil.Process(self.pid).children(recursive=True))
        return [process for process in found if process.pid != self.pid]

    def close_log(self) -> None:
        self._log.close()

    def terminate(self) -> None:
        self._signal_group(self._stop_signal)

    def kill(self) -> None:
        self._signal_group(signal.SIGKILL)

    def reap(self, timeout_s: float) -> bool:
        """Wait for the process itself; True if it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(0.0, timeout_s))
        return self._popen.returncode is not None

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class ChildProcesses:
    """All children of a run. Leaving the context ends them within `stop_timeout_s`, whatever happened."""

    def __init__(self, *, stop_timeout_s: float = 8.0) -> None:
        self._stop_timeout_s = stop_timeout_s
        self._children: list[ChildProcess] = []

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        parent_death_signal: signal.Signals = signal.SIGTERM,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> ChildProcess:
        child = ChildProcess(
            name,
            argv,
            log_path=log_path,
            env=env,
            parent_death_signal=parent_death_signal,
            stop_signal=stop_signal,
        )
        logger.info("process=%s pid=%d started log=%s", name, child.pid, log_path)
        self._children.append(child)
        return child

    def check(self, *, but: ChildProcess | None = None) -> None:
        """Raise ChildProcessError for the first child, other than `but`, that has ended."""
        for child in self._children:
            if child is not but:
                child.check()

    def check_for(self, grace_s: float, check: Callable[[], None] | None = None) -> None:
        """Raise ChildProcessError as soon as a child has ended; return after `grace_s` when none has.

        For a failure whose cause may be a process that is just ending: its peers notice before it is gone.
        `check` is asked in place of `self.check`.
        """
        deadline_s = time.monotonic() + grace_s
        while time.monotonic() < deadline_s:
            (check or self.check)()
            time.sleep(_GRACE_POLL_S)

    def stop(self, *children: ChildProcess) -> None:
        """End the given children (all when none is given) and everything below them."""
        chosen = list(children) or list(self._children)
        below = [process for child in chosen for process in child.descendants()]
        # Killed processes cannot remove their shared memory; what this one uses as well is not theirs.
        pids = [child.pid for child in chosen] + [process.pid for process in below]
        shared = server_files(pids) - server_files([os.getpid()])
        for child in chosen:
            child.terminate()
        deadline_s = time.monotonic() + self._stop_timeout_s / 2
        for child in chosen:
            if not child.reap(deadline_s - time.monotonic()):
                logger.warning("process=%s pid=%d did not end when asked, killing it", child.name, child.pid)
            child.kill()
            child.reap(self._stop_timeout_s / 4)
            child.close_log()
        _kill_all(below, timeout_s=self._stop_timeout_s / 4)
        remove(shared)
        self._children = [child for child in self._children if child not in chosen]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._children:
            self.stop()


def _marked(mark: str) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        # Others' processes, and those that have just ended.
        with suppress(psutil.Error, OSError):
            if process.environ().get(_MARK, "").startswith(mark):
                found.add(process)
    return found


def _kill_all(processes: Sequence[psutil.Process], *, timeout_s: float) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=timeout_s)
