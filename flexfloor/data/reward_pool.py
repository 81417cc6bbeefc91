"""Reward functions in worker processes: a response that is slow or kills its worker costs only itself.

    submit() -> queue -> one thread per worker, one pipe per worker -> Future

Rule 1: a worker has at most one response, and a pipe of its own: whatever happens to a worker, the
response at fault is known and no other one is touched.
Rule 2: a worker that overran or died is killed with all that it started, and replaced.
Rule 3: every future ends: with a reward, a RewardError, or cancelled by close().
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from flexfloor.data.reward_process import WorkerDiedIdle, WorkerFailed, WorkerProcess
from flexfloor.data.rewards import RewardSpec, check_reward
from flexfloor.errors import DeadlineExceeded, RewardError
from flexfloor.types import Prompt

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
MAX_IDLE_DEATHS = 3


@dataclass(frozen=True, slots=True)
class _Task:
    prompt: Prompt
    response_id: str
    response_text: str
    future: Future[float] = field(default_factory=Future)


_Tasks = queue.SimpleQueue[_Task | None]


class RewardPool:
    """Scores responses in `num_workers` processes; use as a context manager, or call close().

    `timeout_s` bounds one call of the function; waiting in the queue and loading do not count. With
    `on_error` None a failure makes the future raise RewardError; with a number the future gives that
    number, and the failure is logged and counted in `num_errors`. What workers print goes to `log_path`,
    or nowhere. Raises ConfigError for a reward that could not run, before any process starts.
    """

    def __init__(
        self,
        spec: RewardSpec,
        *,
        num_workers: int,
        timeout_s: float,
        on_error: float | None = None,
        log_path: Path | None = None,
    ) -> None:
        if num_workers < 1 or timeout_s <= 0:
            problem = f"num_workers={num_workers}, timeout_s={timeout_s}: both must be positive"
            raise ValueError(f"{problem}. Fix: set num_workers to 1 or more and timeout_s above 0")
        check_reward(spec)
        self._spec = spec
        self._on_error = on_error
        self._lock = threading.Lock()
        self._closed = False
        self._num_errors = 0
        self._tasks: _Tasks = queue.SimpleQueue()
        start = partial(WorkerProcess, spec, log_path)
        names = [f"reward-{index}" for index in range(num_workers)]
        self._slots = [_Slot(name, start, timeout_s, self._tasks, self._fail) for name in names]

    @property
    def num_errors(self) -> int:
        """Responses that ended in an error so far."""
        return self._num_errors

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until all workers have loaded the function; RewardError if one cannot, or DeadlineExceeded."""
        deadline_s = time.monotonic() + timeout_s
        for slot in self._slots:
            try:
                slot.started.result(max(0.0, deadline_s - time.monotonic()))
            except FutureTimeoutError as error:
                raise DeadlineExceeded(f"reward workers were not ready after {timeout_s:g} s") from error
            except WorkerFailed as error:
                raise RewardError(f"reward {self._spec.name}: the function {error}") from error

    def submit(self, prompt: Prompt, response_id: str, response_text: str) -> Future[float]:
        """Queue one response; never blocks. The future can be cancelled until a worker takes it."""
        task = _Task(prompt, response_id, response_text)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"response_id={response_id}: the reward pool is closed")
            self._tasks.put(task)
        return task.future

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what is queued and end the workers; a response that is running gets RewardError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._cancel_queued()
        deadline_s = time.monotonic() + timeout_s
        for slot in self._slots:
            self._tasks.put(None)
            slot.stop()
        late = [slot.name for slot in self._slots if not slot.join(deadline_s - time.monotonic())]
        if late:
            logger.warning("reward_workers=%s did not end within timeout_s=%g", ",".join(late), timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cancel_queued(self) -> None:
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                return
            if task is not None and task.future.cancel():
                # Wakes those who wait with concurrent.futures.wait() or as_completed().
                task.future.set_running_or_notify_cancel()

    def _fail(self, task: _Task, problem: str) -> None:
        with self._lock:
            closed = self._closed
            self._num_errors += 1
        if closed:
            problem = "was still running when the pool was closed"
        where = f"reward {self._spec.name}, prompt_id={task.prompt.prompt_id} response_id={task.response_id}"
        error = RewardError(f"{where}: the function {problem}")
        # A pool that is closing says nothing about the response: no substitute reward then.
        if self._on_error is None or closed:
            task.future.set_exception(error)
        else:
            logger.warning("%s; reward=%g instead", error, self._on_error)
            task.future.set_result(self._on_error)


class _Slot:
    """A thread that keeps one worker alive and hands it one response at a time."""

    def __init__(
        self,
        name: str,
        start_worker: Callable[[], WorkerProcess],
        timeout_s: float,
        tasks: _Tasks,
        fail: Callable[[_Task, str], None],
    ) -> None:
        self.name = name
        self.started: Future[None] = Future()
        self._start_worker = start_worker
        self._timeout_s = timeout_s
        self._tasks = tasks
        self._fail = fail
        self._lock = threading.Lock()
        self._stopping = False
        self._worker: WorkerProcess | None = None
        # daemon: an interpreter that exits without close() must not wait for a stuck reward.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Make the thread end soon, whatever its worker does."""
        with self._lock:
            self._stopping = True
            if self._worker is not None:
                self._worker.interrupt()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._usable_worker()
            self.started.set_result(None)
        except WorkerFailed as error:
            self.started.set_exception(error)
        while (task := self._tasks.get()) is not None:
            if task.future.set_running_or_notify_cancel():
                self._score(task)
        if self._worker is not None:
            self._worker.kill()

    def _score(self, task: _Task) -> None:
        try:
            reward = self._ask(task)
        except WorkerFailed as error:
            self._fail(task, str(error))
        # The thread's outermost loop: a request that does not pickle, a reply that does not unpickle. The
        # worker's state is then unknown.
        except Exception as error:
            if self._worker is not None:
                self._worker.kill()
            self._fail(task, f"could not be asked ({type(error).__name__}: {error})")
        else:
            task.future.set_result(reward)

    def _ask(self, task: _Task) -> float:
        for _ in range(MAX_IDLE_DEATHS):
            with suppress(WorkerDiedIdle):
                return self._usable_worker().ask(task.prompt, task.response_text, self._timeout_s)
        raise WorkerFailed(f"was never called: {MAX_IDLE_DEATHS} workers in a row died before they took it")

    def _usable_worker(self) -> WorkerProcess:
        """The worker, or a new one where it has died; WorkerFailed if none can be had."""
        if self._worker is not None and self._worker.is_usable():
            return self._worker
        if self._worker is not None and not self._worker.was_killed:
            logger.warning(
                "reward_worker=%s ended while idle (%s), replacing it", self.name, self._worker.kill()
            )
        with self._lock:
            if self._stopping:
                raise WorkerFailed("found the pool closed")
            self._worker = self._start_worker()
        self._worker.await_ready(START_TIMEOUT_S)
        return self._worker
