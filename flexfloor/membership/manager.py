"""The manager: a thread in the server's main process that feeds Membership and carries out its commands.

Everything that touches the membership or the socket runs in that thread; other threads leave calls for it and
get futures. The callbacks run there too, so they must not wait for the manager.
"""

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import zmq

from flexfloor.errors import DeadlineExceeded
from flexfloor.membership import messages as m
from flexfloor.membership.endpoint import Endpoint
from flexfloor.membership.errors import MembershipFailed
from flexfloor.membership.events import Leave, WeightVersion
from flexfloor.membership.exchange import Exchange
from flexfloor.membership.lookout import Lookout
from flexfloor.membership.peers import Peers
from flexfloor.membership.process_watch import ProcessWatch, this_node
from flexfloor.membership.ranks import RankState
from flexfloor.membership.state import Membership
from flexfloor.membership.status import MembershipStatus, OperationResult
from flexfloor.membership.wakeup import Wakeup

HEARTBEAT_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 10.0
LINGER_MS = 500


class Manager:
    """Owns the membership of one EP group.

    Example:
        manager = Manager(Endpoint.local(folder), membership, on_routing=route, on_fail=end_server)
        manager.start()
        manager.wait_ready(timeout_s=600)
        result = manager.release((2, 3)).result(timeout=60)

    Args:
        membership: the manager's own from `start` on.
        on_routing: takes the ranks that get new requests, and the members of the group; first called when all
            ranks have joined.
        on_fail: takes the reason why the group cannot go on, with the story. Called once at most.
        on_status: takes the status after every event that may have changed it.
        on_result: takes every result, whoever asked; a repeated operation_id gives it again.
        on_abandon: takes a rank that is lost or has exited, once: requests that it has end at the clients.
        on_fence_rank: takes a rank that is silent or out of step, and its pid: see to it that it ends. None:
            SIGKILL, where its process is on this node.
        heartbeat_timeout_s: a rank that is silent for so long is fenced, and then lost.
        node: the machine this is, as a HelloMsg names it; processes of that machine are watched.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        membership: Membership,
        *,
        on_routing: Callable[[tuple[int, ...], tuple[int, ...]], None],
        on_fail: Callable[[str], None],
        on_status: Callable[[MembershipStatus], None] = lambda _status: None,
        on_result: Callable[[OperationResult], None] = lambda _result: None,
        on_abandon: Callable[[int], None] = lambda _ep_rank: None,
        on_fence_rank: Callable[[int, int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        node: str | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._peers = Peers(endpoint.token)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = LINGER_MS
        self._socket.router_mandatory = True
        self._socket.router_handover = True
        self._processes = ProcessWatch()
        lookout = Lookout(
            self._peers,
            self._processes,
            node=this_node() if node is None else node,
            heartbeat_timeout_s=heartbeat_timeout_s,
            on_fence_rank=on_fence_rank,
        )
        self._exchange = Exchange(
            self._socket,
            membership,
            self._peers,
            lookout,
            on_routing=on_routing,
            on_fail=on_fail,
            on_status=on_status,
            on_result=on_result,
            on_abandon=on_abandon,
            clock=clock,
        )
        self._lock = threading.Lock()
        self._calls: deque[tuple[Callable[[], None], Future[Any] | None]] = deque()
        self._wakeup = Wakeup()
        self._is_over = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen. Raises ValueError where the address cannot be had."""
        assert self._thread is None, "a manager starts once"
        self._endpoint.bind(self._socket)
        self._thread = threading.Thread(target=self._run, name="flexfloor-manager", daemon=True)
        self._thread.start()

    def stand_down(self) -> None:
        """The server ends in good order: ranks that go from now on are not lost, and parked ones go too."""
        self._exchange.is_ending = True
        self._call(self._end_parked)

    def close(self) -> None:
        """End the thread. What still waits for an answer gets MembershipFailed."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
            if not was_over:
                self._wakeup.set()
        if self._thread is None:
            self._clean_up()
        else:
            self._thread.join(CLOSE_TIMEOUT_S)

    def wait_ready(self, timeout_s: float) -> None:
        """All ranks have joined. Raises DeadlineExceeded naming those that have not, or MembershipFailed."""
        is_settled = self._exchange.is_settled.wait(timeout_s)
        if self._exchange.end_reason is not None:
            raise MembershipFailed(self._exchange.end_reason)
        if not is_settled:
            missing = [rank for rank, state in self._exchange.status.states.items() if state == "starting"]
            text = f"ep_ranks {missing} have not joined in {timeout_s:g} s at {self._endpoint.address}"
            raise DeadlineExceeded(
                f"{text}; refused: {list(self._exchange.refusals)}, dropped: {self.num_dropped}"
            )

    def release(
        self, ep_ranks: Sequence[int], leave: str = "park", operation_id: str | None = None
    ) -> Future[OperationResult]:
        """Drain the ranks and leave them out of the group. The same operation_id gives the same result."""
        name, ranks, how = operation_id or uuid.uuid4().hex, tuple(ep_ranks), Leave(leave)
        future: Future[OperationResult] = Future()
        self._call(lambda: self._exchange.start_release(name, ranks, how, future), future)
        return future

    def rejoin(
        self, ep_ranks: Sequence[int] = (), operation_id: str | None = None
    ) -> Future[OperationResult]:
        """Bring ranks back; none named: all that are parked or on their way there."""
        name, ranks = operation_id or uuid.uuid4().hex, tuple(ep_ranks)
        future: Future[OperationResult] = Future()
        self._call(lambda: self._exchange.start_rejoin(name, ranks, future), future)
        return future

    def taken_up(self) -> Future[None]:
        """Done when every call before it was looked at: a refusal is known by then."""
        future: Future[None] = Future()
        self._call(lambda: _set(future), future)
        return future

    def fence(self, full: bool) -> Future[str]:
        """Let the group stand still, `full`: with every live rank in it.

        The future gives the id for `unfence`, or FenceRefused. Cancel it to give up waiting.
        """
        future: Future[str] = Future()
        self._call(lambda: self._exchange.start_fence(uuid.uuid4().hex, full, future), future)
        return future

    def unfence(self, fence_id: str) -> None:
        self._call(lambda: self._exchange.release_fence(fence_id))

    def weights_updated(self, version: WeightVersion) -> None:
        """Every member holds these weights now. To be called before the fence of the update is released."""
        self._call(lambda: self._exchange.update_weights(version))

    def status(self) -> MembershipStatus:
        """As of the last event."""
        return self._exchange.status

    def hellos(self) -> dict[int, m.HelloMsg]:
        """What each rank said of itself, without the token."""
        return {rank: peer.hello for rank, peer in sorted(self._peers.agents.copy().items())}

    def loop_ages(self) -> dict[int, float]:
        """Per rank, seconds since its model's loop was alive, as of its last heartbeat."""
        return {rank: peer.loop_age_s for rank, peer in sorted(self._peers.agents.copy().items())}

    @property
    def num_dropped(self) -> dict[str, int]:
        """Frames that were dropped, by reason (BadFrameReason)."""
        return dict(self._peers.num_dropped)

    def _call(self, call: Callable[[], None], future: Future[Any] | None = None) -> None:
        with self._lock:
            if not self._is_over:
                self._calls.append((call, future))
                self._wakeup.set()
                return
        if future is not None:
            future.set_exception(MembershipFailed(self._reason_of_end()))

    def _end_parked(self) -> None:
        for ep_rank, state in self._exchange.status.states.items():
            if state == RankState.parked:
                self._exchange.order(ep_rank, m.StandDownMsg())

    def _reason_of_end(self) -> str:
        return self._exchange.end_reason or "the manager is closed"

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        poller.register(self._processes.fd, zmq.POLLIN)
        try:
            while not self._is_over:
                poller.poll(self._exchange.poll_ms())
                self._exchange.woke()
                self._wakeup.clear()
                while self._calls:
                    self._calls.popleft()[0]()
                self._exchange.turn()
        except Exception as error:
            self._exchange.end(f"the manager broke: {type(error).__name__}: {error}")
            raise
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        with self._lock:
            self._is_over = True
        self._socket.close()
        self._context.term()
        self._processes.close()
        self._exchange.close()
        for _, future in self._calls:
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(MembershipFailed(self._reason_of_end()))


def _set(future: Future[None]) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(None)
