"""The driver's end: asks the manager for releases and rejoins. Synchronous, one thread, every wait ends."""

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import zmq

from flexfloor.errors import DeadlineExceeded
from flexfloor.membership import messages as m
from flexfloor.membership.endpoint import Endpoint
from flexfloor.membership.events import Leave
from flexfloor.membership.status import MembershipStatus, OperationResult

logger = logging.getLogger(__name__)

LINGER_MS = 500
LAST_STATUS_S = 1.0
"""How long a call that has failed asks why."""


class DriverClient:
    """Requests of one manager.

    Example:
        with DriverClient(Endpoint.read(folder), timeout_s=60) as client:
            client.release((2, 3))
            client.rejoin()

    `release` and `rejoin` wait for the result; `submit_release` and `submit_rejoin` do not, and `poll` gives
    their results later. A repeated operation_id does nothing twice and gives the first one's result.
    A refusal is a result that is not ok. Waits raise DeadlineExceeded, with the manager's status.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float = 60.0) -> None:
        self._address = endpoint.address
        self._timeout_s = timeout_s
        self._results: dict[str, OperationResult] = {}
        self._open: set[str] = set()
        self._num_requests = 0
        self._status: m.StatusMsg | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = LINGER_MS
        self._socket.sndhwm = 0
        endpoint.connect(self._socket)
        self._socket.send(m.encode(m.ClientHelloMsg(token=endpoint.token)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """What was submitted goes on without this client."""
        self._socket.close()
        self._context.term()

    def release(
        self, ep_ranks: Sequence[int], leave: str = "park", operation_id: str | None = None
    ) -> OperationResult:
        """Let ranks finish what they have and leave the group."""
        name = self.submit_release(ep_ranks, leave, operation_id)
        return self._wait_result(name, f"release of ep_ranks {tuple(ep_ranks)}")

    def rejoin(self, ep_ranks: Sequence[int] = (), operation_id: str | None = None) -> OperationResult:
        """Bring ranks back; none named: all that are parked or on their way there."""
        name = self.submit_rejoin(ep_ranks, operation_id)
        return self._wait_result(name, f"rejoin of ep_ranks {tuple(ep_ranks) or 'that are parked'}")

    def submit_release(
        self, ep_ranks: Sequence[int], leave: str = "park", operation_id: str | None = None
    ) -> str:
        """The operation_id under which `poll` gives the result."""
        name = operation_id or uuid.uuid4().hex
        self._submit(name, m.ReleaseMsg(name, tuple(ep_ranks), Leave(leave)))
        return name

    def submit_rejoin(self, ep_ranks: Sequence[int] = (), operation_id: str | None = None) -> str:
        name = operation_id or uuid.uuid4().hex
        self._submit(name, m.RejoinMsg(name, tuple(ep_ranks)))
        return name

    def poll(self) -> list[OperationResult]:
        """Results that have come since the last call, each once; without those that a call waited for."""
        self._receive(0.0)
        found = list(self._results.values())
        self._results.clear()
        return found

    def status(self, timeout_s: float | None = None) -> MembershipStatus:
        """What the manager knows now."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        self._num_requests += 1
        request_id = self._num_requests
        self._socket.send(m.encode(m.StatusRequestMsg(request_id)))
        if not self._wait(lambda: self._has_status(request_id), limit_s):
            raise DeadlineExceeded(f"status: {self._silence(limit_s)}")
        assert self._status is not None, "waited for"
        return self._status.status

    def _has_status(self, request_id: int) -> bool:
        return self._status is not None and self._status.request_id == request_id

    def _submit(self, name: str, message: m.RequestMsg) -> None:
        self._open.add(name)
        self._socket.send(m.encode(message))

    def _wait_result(self, name: str, what: str) -> OperationResult:
        if self._wait(lambda: name in self._results, self._timeout_s):
            return self._results.pop(name)
        try:
            status = f"the manager's status: {self.status(LAST_STATUS_S)}"
        except DeadlineExceeded:
            status = self._silence(LAST_STATUS_S)
        raise DeadlineExceeded(f"{what} (operation {name}): not done in {self._timeout_s:g} s; {status}")

    def _silence(self, limit_s: float) -> str:
        return (
            f"no answer from the manager at {self._address} in {limit_s:g} s; it answers no wrong token and "
            "no wrong key"
        )

    def _wait(self, is_there: Callable[[], bool], limit_s: float) -> bool:
        end_s = time.monotonic() + limit_s
        while not is_there():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            self._receive(left_s)
        return True

    def _receive(self, timeout_s: float) -> None:
        """Everything that is there; waits for the first one."""
        wait_ms = int(1000 * timeout_s) + (timeout_s > 0)
        while self._socket.poll(wait_ms):
            wait_ms = 0
            try:
                message = m.decode_to_client(self._socket.recv_multipart())
            except m.BadFrame as error:
                logger.error("dropped a frame of the manager: %s", error)
                continue
            if isinstance(message, m.StatusMsg):
                self._status = message
            elif message.operation_id in self._open:
                self._open.discard(message.operation_id)
                self._results[message.operation_id] = OperationResult(
                    operation_id=message.operation_id,
                    ok=message.ok,
                    reason=message.reason,
                    membership_epoch=message.membership_epoch,
                )
