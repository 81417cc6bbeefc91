"""One reward worker as the pool sees it: a process, its pipe, and how it ends.

Invariant: a process that was started is killed with its whole session before its exit is collected. Until
then its process group cannot be taken by a stranger, so the kill never hits anything else.
"""

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

from flexfloor.data.child_process import child_command, child_environment
from flexfloor.data.reward_worker import Reply
from flexfloor.data.rewards import RewardSpec
from flexfloor.types import Prompt

_REAP_TIMEOUT_S = 2.0


class WorkerFailed(Exception):
    """No score came of it; the text continues a sentence whose subject is the reward function."""


class WorkerEnded(WorkerFailed):
    """The process is gone."""


class WorkerDiedIdle(WorkerFailed):
    """The process was gone before it took the response, which is not at fault."""


class WorkerProcess:
    """A reward worker. All methods but `interrupt` belong to one thread."""

    def __init__(self, spec: RewardSpec, log_path: Path | None) -> None:
        self._lock = threading.Lock()
        self._pipe, theirs = Pipe()
        try:
            with theirs:
                self._process = _start(theirs.fileno(), log_path)
        except OSError as error:
            self._pipe.close()
            raise WorkerFailed(f"got no worker process ({error})") from error
        with suppress(OSError):  # it died at once: await_ready says how
            self._pipe.send(spec)

    def await_ready(self, timeout_s: float) -> None:
        """Wait until the function is loaded; WorkerFailed if it cannot be."""
        kind, problem = self._receive(time.monotonic() + timeout_s, timeout_s)
        if kind != "ready":
            self.kill()
            raise WorkerFailed(f"could not be loaded: it {problem}")

    def ask(self, prompt: Prompt, response_text: str, timeout_s: float) -> float:
        """Score one response; WorkerFailed otherwise, and then `is_usable` says whether the worker lives."""
        deadline_s = time.monotonic() + timeout_s
        with suppress(OSError):  # it died: _receive says how
            self._pipe.send((prompt, response_text))
        try:
            self._receive(deadline_s, timeout_s)
        except WorkerEnded as error:
            raise WorkerDiedIdle(str(error)) from None
        kind, value = self._receive(deadline_s, timeout_s)
        if kind != "score":
            raise WorkerFailed(str(value))
        return float(value)

    def is_usable(self) -> bool:
        """True if it waits for a request. Whatever an idle worker sends, end of file included, means no."""
        return not self.was_killed and not self._pipe.poll(0)

    @property
    def was_killed(self) -> bool:
        """True once `kill` has run, so that whoever killed it has said why."""
        return self._pipe.closed

    def interrupt(self) -> None:
        """Signal it to die, from any thread; the owning thread then sees the pipe end."""
        with self._lock:
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> str:
        """End it and all that it started; returns how it had ended, for an error text."""
        self.interrupt()
        self._pipe.close()
        with self._lock, suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_TIMEOUT_S)
        return _how_it_ended(self._process.returncode)

    def _receive(self, deadline_s: float, timeout_s: float) -> Reply:
        try:
            if self._pipe.poll(max(0.0, deadline_s - time.monotonic())):
                reply: Reply = self._pipe.recv()
                return reply
        except (EOFError, OSError):
            raise WorkerEnded(f"ended its worker process ({self.kill()})") from None
        self.kill()
        raise WorkerFailed(f"did not finish within {timeout_s:g} s; its worker was killed and replaced")


def _start(fileno: int, log_path: Path | None) -> "subprocess.Popen[bytes]":
    if log_path is not None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
    with open(log_path or os.devnull, "ab") as log:
        return subprocess.Popen(
            child_command("flexfloor.data.reward_worker", str(fileno)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(fileno,),
            # A session of its own: Ctrl-C does not reach it, and one kill reaches all that it started.
            start_new_session=True,
            # The workers share their cores with the rollout; a library's thread pool in each would fight
            # for them.
            env={**child_environment(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        )


def _how_it_ended(return_code: int | None) -> str:
    if return_code is None:
        return "it does not react to SIGKILL"
    if return_code < 0:
        hint = ", perhaps out of memory" if return_code == -signal.SIGKILL else ""
        return f"signal {signal.Signals(-return_code).name}{hint}"
    return f"exit code {return_code}"
