"""A rank's link to the manager: a thread of the scheduler process that the model's loop never waits for."""

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from flexfloor.errors import DeadlineExceeded
from flexfloor.membership import messages as m
from flexfloor.membership.endpoint import Endpoint
from flexfloor.membership.errors import MembershipFailed
from flexfloor.membership.link_state import LinkState
from flexfloor.membership.steady_clock import SteadyClock
from flexfloor.membership.wakeup import Wakeup

logger = logging.getLogger(__name__)

MANAGER_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0
LAST_WORDS_S = 2.0
"""How long a link that closes waits for the manager to have heard its last report."""
LINGER_MS = 1000
ANSWER_S = 0.2
"""How soon a closing link asks again."""


class AgentLink:
    """Connects, says hello, keeps the heartbeat going; hands orders to the loop and reports to the manager.

    Example, in a scheduler's loop:
        for order in link.orders():
            obey(order)
        link.beat()

    `orders` and `wait_recover` are for one thread; `send` and `beat` are for any. After a ManagerLostMsg no
    order follows.

    Args:
        on_break: takes generation and lost ranks of a BreakMsg, in the link's own thread and at once, since
            the loop may be blocked in a collective with the dead. Breaks the sockets of the groups; must not
            wait. May be called while a recovery of an earlier generation is under way.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        hello: m.HelloMsg,
        heartbeat_s: float = 1.0,
        *,
        manager_timeout_s: float = MANAGER_TIMEOUT_S,
        on_break: Callable[[int, tuple[int, ...]], None] = lambda _generation, _lost: None,
    ) -> None:
        self._endpoint = endpoint
        self._hello = msgspec.structs.replace(hello, token=hello.token or endpoint.token)
        self._heartbeat_s = heartbeat_s
        self._manager_timeout_s = manager_timeout_s
        self._on_break = on_break
        self._generation = 0
        self._lock = threading.Lock()
        self._orders: deque[m.OrderMsg] = deque()
        self._outbox: deque[m.ReportMsg] = deque()
        self._clock = SteadyClock(time.monotonic)
        self._orders_wait = Wakeup()
        self._wakeup = Wakeup()
        self._beat_at_s = time.monotonic()
        self._is_closing = False
        self._welcomed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def generation(self) -> int:
        """Of the newest BreakMsg heard; 0 before the first. What was built for an older one is void."""
        return self._generation

    @property
    def wake_fd(self) -> int:
        """Readable while orders wait, for the poll of a loop that has nothing else to do."""
        return self._orders_wait.fd

    def start(self) -> None:
        assert self._thread is None, "a link starts once"
        self._thread = threading.Thread(
            target=self._run, name=f"flexfloor-agent-{self._hello.ep_rank}", daemon=True
        )
        self._thread.start()

    def wait_welcome(self, timeout_s: float) -> None:
        """Until the manager has taken this rank in. Raises DeadlineExceeded."""
        if not self._welcomed.wait(timeout_s):
            raise DeadlineExceeded(
                f"ep_rank {self._hello.ep_rank}: no welcome from the manager at {self._endpoint.address} in "
                f"{timeout_s:g} s; it answers no wrong token and no wrong key"
            )

    def orders(self) -> list[m.OrderMsg]:
        """What has come since the last call; empty costs next to nothing."""
        if not self._orders:
            return []
        with self._lock:
            found = list(self._orders)
            self._orders.clear()
            if not self._is_closing:
                self._orders_wait.clear()
        return found

    def wait_recover(self, report: Callable[[int], m.BrokenMsg], timeout_s: float) -> m.RecoverMsg:
        """The model's thread has left its collective: report that, and wait for the next group.

        Args:
            report: what this rank holds, for a generation. Asked again whenever a newer generation is heard.
            timeout_s: for the whole wait.

        Orders that came before are void and dropped. When setting up the group of the answer fails, call
        this again: the next loss has been or will be heard. Raises DeadlineExceeded, or MembershipFailed when
        the manager is gone.
        """
        end_s = time.monotonic() + timeout_s
        reported = -1
        while True:
            if self._generation > reported:
                reported = self._generation
                self.send(report(reported))
            for order in self.orders():
                if isinstance(order, m.ManagerLostMsg):
                    raise MembershipFailed(order.reason)
                if isinstance(order, m.RecoverMsg) and order.generation == self._generation:
                    return order
            self.beat()
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded(
                    f"ep_rank {self._hello.ep_rank}: broken for {timeout_s:g} s, generation {reported}, and "
                    "the manager gave no next group"
                )
            select.select([self.wake_fd], [], [], min(left_s, self._heartbeat_s))

    def send(self, message: m.ReportMsg) -> None:
        with self._lock:
            if self._is_closing:
                return
            self._outbox.append(message)
            self._wakeup.set()

    def beat(self) -> None:
        """The loop is alive."""
        self._beat_at_s = time.monotonic()

    def close(self) -> None:
        """What was sent before still goes out, if the manager listens. Says no goodbye by itself."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._wakeup.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread is None or not self._thread.is_alive():
            self._orders_wait.close()
            self._wakeup.close()

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.linger = LINGER_MS
        socket.sndhwm = 0
        self._endpoint.connect(socket)
        state = LinkState(
            self._hello,
            self._manager_timeout_s,
            self._clock(),
            # Without a high-water mark a DEALER queues while it connects, so this never blocks.
            say=lambda message: socket.send(m.encode(message)),
            deliver=self._deliver,
            on_break=self._break,
        )
        try:
            self._serve(socket, state)
        finally:
            socket.close()
            context.term()

    def _serve(self, socket: "zmq.Socket[bytes]", state: LinkState) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        state.open()
        beats_at_s = self._clock() + self._heartbeat_s
        while not self._is_closing:
            self._say_all(state)
            self._clock.sleeps_until(beats_at_s)
            poller.poll(int(1000 * max(0.0, beats_at_s - self._clock())) + 1)
            self._clock.woke()
            self._wakeup.clear()
            self._receive_all(socket, state)
            now_s = self._clock()
            if now_s >= beats_at_s:
                beats_at_s = now_s + self._heartbeat_s
                if silence := state.beat(time.monotonic() - self._beat_at_s, now_s):
                    state.lose_manager(f"nothing from {self._endpoint.address} {silence}")

        self._close(socket, state)

    def _say_all(self, state: LinkState) -> None:
        while self._outbox:
            state.report(self._outbox.popleft(), self._clock())

    def _close(self, socket: "zmq.Socket[bytes]", state: LinkState) -> None:
        """The process may end next, and then nobody would say again what was not heard."""
        self._say_all(state)
        end_s = time.monotonic() + LAST_WORDS_S
        while state.is_welcome and not state.is_all_heard and not state.lost_reason:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            state.beat(0.0, self._clock())
            socket.poll(int(1000 * min(left_s, ANSWER_S)) + 1)
            self._receive_all(socket, state)

    def _receive_all(self, socket: "zmq.Socket[bytes]", state: LinkState) -> None:
        while socket.poll(0):
            try:
                message = m.decode_to_agent(socket.recv_multipart())
            except m.BadFrame as error:
                logger.error("ep_rank=%d dropped a frame of the manager: %s", self._hello.ep_rank, error)
                continue
            state.take(message, self._clock())
            if state.is_welcome:
                self._welcomed.set()

    def _break(self, generation: int, lost: tuple[int, ...]) -> None:
        self._generation = generation
        self._on_break(generation, lost)

    def _deliver(self, order: m.OrderMsg) -> None:
        if isinstance(order, m.ManagerLostMsg):
            logger.error("ep_rank=%d manager lost: %s", self._hello.ep_rank, order.reason)
        with self._lock:
            self._orders.append(order)
            self._orders_wait.set()
