"""Releases and rejoins by operation_id: an answer may come later, and a repeat does nothing twice.

Requests come in the event loop; results come from the manager's thread, those of other clients too.
"""

import threading
from collections import OrderedDict
from concurrent.futures import Future

from flexfloor.membership.status import OperationResult

NUM_KEPT = 1000


class Operations:
    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._num_kept = num_kept
        self._lock = threading.Lock()
        self._open: dict[str, Future[OperationResult]] = {}
        self._done: OrderedDict[str, OperationResult] = OrderedDict()
        self._requests: OrderedDict[str, str] = OrderedDict()
        """operation_id -> what was asked for, in words."""

    def conflict(self, operation_id: str, request: str) -> str:
        """Why this id cannot stand for this request; empty: it can."""
        known = self._requests.get(operation_id, request)
        if known == request:
            return ""
        return f"operation_id {operation_id} stands for another request ({known}). Fix: take a new one"

    def known(self, operation_id: str) -> "Future[OperationResult] | None":
        """Of an earlier request with this id."""
        with self._lock:
            if (found := self._open.get(operation_id)) is not None:
                return found
            done = self._done.get(operation_id)
        if done is None:
            return None
        future: Future[OperationResult] = Future()
        future.set_result(done)
        return future

    def add(self, operation_id: str, request: str, future: "Future[OperationResult]") -> None:
        with self._lock:
            self._requests[operation_id] = request
            self._open[operation_id] = future
        future.add_done_callback(lambda done: self._take(operation_id, done))

    def _take(self, operation_id: str, done: "Future[OperationResult]") -> None:
        if done.cancelled() or done.exception() is not None:
            with self._lock:
                self._open.pop(operation_id, None)
        else:
            self.finish(done.result())

    def finish(self, result: OperationResult) -> None:
        """Every result of the manager, in its thread."""
        with self._lock:
            self._open.pop(result.operation_id, None)
            self._done[result.operation_id] = result
            while len(self._done) > self._num_kept:
                dropped, _ = self._done.popitem(last=False)
                self._requests.pop(dropped, None)
