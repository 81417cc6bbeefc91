"""One life of the server in the simulated network: the real Exchange, Membership, Peers and Lookout."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from net_groups import Groups
from net_rank import SimRank

from flexfloor.membership.errors import MembershipFailed
from flexfloor.membership.events import Leave, WeightVersion
from flexfloor.membership.exchange import Exchange
from flexfloor.membership.lookout import Lookout
from flexfloor.membership.peers import Peers
from flexfloor.membership.state import Membership

if TYPE_CHECKING:
    from net_world import World

HEARTBEAT_TIMEOUT_S = 15.0
NUM_EXPERTS_EACH = 2
HERE, FAR = "here", "far"


class Inbox:
    """Plays the ROUTER socket."""

    def __init__(self, server: "Server") -> None:
        self._server = server
        self.frames: deque[list[bytes]] = deque()

    def poll(self, timeout: int = 0) -> int:
        return len(self.frames)

    def recv_multipart(self) -> list[bytes]:
        return self.frames.popleft()

    def send_multipart(self, msg_parts: Any, flags: int = 0) -> None:
        identity, frame = msg_parts
        self._server.world.send_to_rank(identity, frame)


class SimProcesses:
    """Plays ProcessWatch; a pid is an incarnation here."""

    def __init__(self, server: "Server") -> None:
        self._server = server
        self._watched: dict[int, SimRank] = {}

    def add(self, ep_rank: int, pid: int) -> None:
        self._watched.setdefault(ep_rank, self._server.ranks[ep_rank])

    def watches(self, ep_rank: int) -> bool:
        return ep_rank in self._watched

    def ended(self) -> list[int]:
        found = [ep_rank for ep_rank, rank in self._watched.items() if not rank.is_alive]
        for ep_rank in found:
            del self._watched[ep_rank]
        return found

    def kill(self, ep_rank: int) -> None:
        if ep_rank in self._watched:
            self._server.world.at(0.01, self._watched[ep_rank].die)


class Server:
    def __init__(self, world: "World", number: int, version: WeightVersion) -> None:
        story = world.story
        self.world, self.number, self.version_at_start = world, number, version
        self.token = f"token{number}"
        self.is_stopped = self.is_over = False
        self.has_changed = True
        """Since the checks looked."""
        self.clock_offset_s = 0.0
        self.routing: tuple[int, ...] = ()
        self.failed: str | None = None
        self.membership = Membership(
            story.ep_size, story.floor, story.ep_size * NUM_EXPERTS_EACH, prepare_timeout_s=20,
            cancel_timeout_s=20, switch_timeout_s=30, loss_wait_s=5, recover_timeout_s=30,
        )  # fmt: skip
        self.peers = Peers(self.token)
        self.inbox = Inbox(self)
        self._calls: deque[Callable[[], None]] = deque()
        self._wakes_at_s = -1.0
        self._futures: list[Future[Any]] = []
        lookout = Lookout(
            self.peers, SimProcesses(self), node=HERE, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            on_fence_rank=None,
        )  # fmt: skip
        self.exchange = Exchange(
            self.inbox, self.membership, self.peers, lookout,
            on_routing=self._route, on_fail=self._fail, on_status=self._see,
            on_result=lambda _result: None, on_abandon=self._abandon,
            clock=lambda: world.now_s + self.clock_offset_s,
        )  # fmt: skip
        self.groups = Groups(world)
        self.groups.open(0, tuple(range(story.ep_size)))
        self.ranks = []
        for ep_rank in range(story.ep_size):
            node = FAR if ep_rank >= story.ep_size - story.num_far else HERE
            self.ranks.append(SimRank(self, ep_rank, world.new_number(), node))

    def receive(self, identity: bytes, frame: bytes) -> None:
        self.inbox.frames.append([identity, frame])
        self.turn()

    def call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self.turn()

    def turn(self) -> None:
        """As Manager._run does."""
        if self.is_stopped or self.is_over:
            return
        self.exchange.woke()
        while self._calls:
            self._calls.popleft()()
        self.exchange.turn()
        self.world.checks.after_turn(self)
        wait_ms = self.exchange.poll_ms()
        if wait_ms is not None:
            self._wake_at(self.world.now_s + wait_ms / 1000)

    def _wake_at(self, at_s: float) -> None:
        if self.world.now_s < self._wakes_at_s <= at_s:
            return
        self._wakes_at_s = at_s
        self.world.at(at_s - self.world.now_s, self.turn)

    def release(self, name: str, ep_ranks: tuple[int, ...], leave: str) -> Future[Any]:
        future = self._future()
        self.call(lambda: self.exchange.start_release(name, ep_ranks, Leave(leave), future))
        return future

    def rejoin(self, name: str, ep_ranks: tuple[int, ...]) -> Future[Any]:
        future = self._future()
        self.call(lambda: self.exchange.start_rejoin(name, ep_ranks, future))
        return future

    def fence(self, name: str, full: bool, granted: Callable[[], None]) -> Future[Any]:
        future = self._future()
        world = self.world
        future.add_done_callback(lambda done: None if done.exception() else world.at(0.0, granted))
        self.call(lambda: self.exchange.start_fence(name, full, future))
        return future

    def _future(self) -> Future[Any]:
        self._futures.append(Future())
        return self._futures[-1]

    def unfence(self, name: str) -> None:
        self.call(lambda: self.exchange.release_fence(name))

    def end(self) -> None:
        self.is_over = True
        self.exchange.close()
        for future in self._futures:
            if not future.done():
                future.set_exception(MembershipFailed("the server has ended"))

    def _see(self, _status: object) -> None:
        self.has_changed = True

    def _route(self, ep_ranks: tuple[int, ...], _members: tuple[int, ...]) -> None:
        self.routing = ep_ranks

    def _fail(self, reason: str) -> None:
        self.failed = reason
        self.routing = ()
        self.world.server_failed(self, reason)

    def _abandon(self, ep_rank: int) -> None:
        self.world.clients.abandon(self.ranks[ep_rank])
        self.world.updates.rank_lost(self)
