"""Time, wires and faults of the simulated network. All chance comes from the story's seed."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from net_checks import LEGITIMATE, Checks, Violation
from net_clients import Clients, Updates
from net_rank import SimRank
from net_server import HERE, Server
from net_story import ACTIVE_S, Step, Story, shortened

import flexfloor.membership.messages as m

LIMIT_S = 600.0
RESTART_S = 1.0
START_LIMIT_S = 60.0
"""As Manager.wait_ready: a server whose ranks have not all joined by then is started anew."""


class World:
    """Example: World(drawn(seed=7)).run()   # raises Violation"""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.rng = random.Random(f"world {story.seed}")
        self.now_s = 0.0
        self.num_events = 0
        self.is_severe = False
        """Something was done that may cost a rank."""
        self.faults: Counter[str] = Counter()
        """Faults that took place, by kind."""
        self.failures: Counter[str] = Counter()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count(1000)
        self._futures: list[Future[Any]] = []
        self._rates = {"lossy": 0.0, "repeating": 0.0, "slow": 0.0}
        self._cut: Counter[int] = Counter()
        """ep_rank -> partitions that it is behind."""
        self._connections: Counter[int] = Counter()
        self._last_arrival: dict[tuple[int, bool], int] = {}
        self._num_sent = itertools.count()
        self._kills_in: dict[str, list[int]] = {"recovery": [], "change": []}
        """Ranks to kill as soon as one is in flight."""
        self._num_faults_under_way = 0
        self._by_identity: dict[bytes, SimRank] = {}
        self.checks = Checks(self)
        self.clients = Clients(self)
        self.updates = Updates(self)
        self.server = self._start_server()

    def new_number(self) -> int:
        return next(self._numbers)

    def at(self, wait_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + wait_s, next(self._order), action))

    def run(self) -> None:
        for step in self.story.steps:
            self.at(step.at_s, lambda step=step: self._take(step))
        looks_at_s = ACTIVE_S + 1
        while self._queue:
            self.now_s, _, action = heapq.heappop(self._queue)
            self._act(action)
            for what, ep_ranks in self._kills_in.items():
                if ep_ranks and getattr(self.server.membership, what) is not None:
                    self._kill(ep_ranks.pop(), f"kill_in_{what}")
            if self.now_s >= looks_at_s:
                looks_at_s = self.now_s + 1
                if self._is_at_rest():
                    return
                if self.now_s > LIMIT_S:
                    membership = self.server.membership
                    text = f"{self.clients.num_open} responses are open, {membership.status()}"
                    self.checks.that("progress", False, f"{text}\n{membership.story()}")

    def _act(self, action: Callable[[], None]) -> None:
        self.num_events += 1
        try:
            action()
        except Violation:
            raise
        except AssertionError as error:
            raise Violation("assertion", str(error)) from error

    def _is_at_rest(self) -> bool:
        server = self.server
        membership = server.membership
        is_busy = membership.change or membership.recovery or membership.operations.open
        return (
            not (is_busy or self._num_faults_under_way or self.clients.num_open or server.is_over)
            and membership.is_ready
            and not membership.fences.num_all
            and all(future.done() for future in self._futures)
        )

    # Servers.

    def _start_server(self) -> Server:
        server = Server(self, self.new_number(), self.updates.version)
        self.server = server
        for rank in server.ranks:
            self._by_identity[rank.identity] = rank
        server.turn()
        self.at(START_LIMIT_S, lambda: None if server.membership.is_ready else self._end_server(server, True))
        return server

    def server_failed(self, server: Server, reason: str) -> None:
        self.checks.ended(reason)
        self.failures[next(text for text in LEGITIMATE if text in reason)] += 1
        self.at(0.0, lambda: self._end_server(server, kills=True))

    def _end_server(self, server: Server, kills: bool) -> None:
        if server.is_over:
            return
        server.end()
        for rank in server.ranks:
            if kills and rank.link._hello.node == HERE:
                rank.die()
        self.at(RESTART_S, self._start_server)
        for rank in server.ranks:
            self.at(RESTART_S, lambda rank=rank: self.clients.abandon(rank))

    def process_ended(self, rank: SimRank) -> None:
        self.at(self.rng.uniform(0.001, 0.02), lambda: rank.server.groups.leave(rank))
        if not rank.server.is_over:
            self.at(self.rng.uniform(0.001, 0.01), rank.server.turn)

    # Wires.

    def send_to_manager(self, rank: SimRank, frame: bytes) -> None:
        self._transport(rank, True, lambda: self.server.receive(rank.identity, frame))

    def send_to_rank(self, identity: bytes, frame: bytes) -> None:
        rank = self._by_identity.get(identity)
        if rank is not None:
            self._transport(rank, False, lambda: self._arrive(rank, frame))

    def _arrive(self, rank: SimRank, frame: bytes) -> None:
        if rank.is_alive:
            rank.inbox.append(frame)
            rank.take_frames()

    def _transport(self, rank: SimRank, is_up: bool, deliver: Callable[[], None]) -> None:
        if self._cut[rank.ep_rank]:
            self.faults["messages cut off"] += 1
            return
        if self._rates["lossy"] and self.rng.random() < self._rates["lossy"]:
            self.faults["messages dropped"] += 1
            return
        num_copies = 1
        if self._rates["repeating"] and self.rng.random() < self._rates["repeating"]:
            self.faults["messages repeated"] += 1
            num_copies = 2
        link, number = (rank.incarnation, is_up), next(self._num_sent)
        connection = self._connections[rank.ep_rank]
        for _ in range(num_copies):
            wait_s = self.rng.uniform(0.001, 0.03)
            if self._rates["slow"]:
                self.faults["messages delayed"] += 1
                wait_s += self.rng.uniform(0, self._rates["slow"])
            self.at(wait_s, lambda: self._land(link, number, connection, rank, deliver))

    def _land(
        self,
        link: tuple[int, bool],
        number: int,
        connection: int,
        rank: SimRank,
        deliver: Callable[[], None],
    ) -> None:
        if self._cut[rank.ep_rank] or connection != self._connections[rank.ep_rank]:
            self.faults["messages cut off"] += 1
            return
        if number < self._last_arrival.get(link, -1):
            self.faults["messages overtaken"] += 1
        self._last_arrival[link] = max(number, self._last_arrival.get(link, -1))
        deliver()

    # Steps.

    def _take(self, step: Step) -> None:
        self.is_severe = self.is_severe or step.is_severe
        getattr(self, f"_{step.kind}")(*step.args)

    def _for_a_while(self, seconds: float, end: Callable[[], None]) -> None:
        self._num_faults_under_way += 1

        def over() -> None:
            self._num_faults_under_way -= 1
            end()

        self.at(seconds, over)

    def _request(self, length: int) -> None:
        self.clients.ask(length)

    def _burst(self, num_requests: int, seconds: float) -> None:
        for _ in range(num_requests):
            self.at(self.rng.uniform(0, seconds), lambda: self.clients.ask(self.rng.randint(1, 6)))

    def _release(self, ep_ranks: tuple[int, ...], leave: str) -> None:
        if not self.server.is_over:
            self._futures.append(self.server.release(f"op{self.new_number()}", ep_ranks, leave))

    def _rejoin(self, ep_ranks: tuple[int, ...]) -> None:
        if not self.server.is_over:
            self._futures.append(self.server.rejoin(f"op{self.new_number()}", ep_ranks))

    def _fence(self, full: bool, held_s: float) -> None:
        server, name = self.server, f"fence{self.new_number()}"
        if not server.is_over:
            release = lambda: self.at(held_s, lambda: server.unfence(name))  # noqa: E731
            self._futures.append(server.fence(name, full, release))

    def _update(self) -> None:
        if not self.server.is_over:
            self.updates.start()

    def _kill(self, ep_rank: int, kind: str = "kill") -> None:
        rank = self.server.ranks[ep_rank]
        if rank.is_alive and not self.server.is_over:
            self.faults[f"{kind}: rank killed"] += 1
            rank.die()

    def _kill_in_recovery(self, ep_rank: int) -> None:
        self._kills_in["recovery"].append(ep_rank)

    def _kill_in_change(self, ep_rank: int) -> None:
        self._kills_in["change"].append(ep_rank)

    def _stop(self, ep_rank: int, seconds: float) -> None:
        rank = self.server.ranks[ep_rank]
        if rank.is_alive and not rank.is_stopped:
            self.faults["rank stopped"] += 1
            rank.is_stopped = True
            if seconds < 100:
                self._for_a_while(seconds, lambda: self._resume(rank))

    def _resume(self, rank: SimRank) -> None:
        rank.is_stopped = False
        rank.take_frames()

    def _glitch(self, ep_rank: int) -> None:
        rank = self.server.ranks[ep_rank]
        if rank.is_alive and rank.place == "gather" and not rank.is_stopped:
            self.faults["collective broken, nobody dead"] += 1
            rank._run(rank.turn, lambda: rank.broke("glitch"))

    def _lossy(self, rate: float, seconds: float) -> None:
        self._set_rate("lossy", rate, seconds)

    def _repeating(self, rate: float, seconds: float) -> None:
        self._set_rate("repeating", rate, seconds)

    def _slow(self, delay_s: float, seconds: float) -> None:
        self._set_rate("slow", delay_s, seconds)

    def _set_rate(self, kind: str, rate: float, seconds: float) -> None:
        self._rates[kind] = rate
        self._for_a_while(seconds, lambda: self._rates.__setitem__(kind, 0.0))

    def _partition(self, ep_ranks: tuple[int, ...], seconds: float) -> None:
        self.faults["partition"] += 1
        self._cut.update(ep_ranks)
        self._for_a_while(seconds, lambda: self._cut.subtract(ep_ranks))

    def _reconnect(self, ep_rank: int) -> None:
        self.faults["connection lost"] += 1
        self._connections[ep_rank] += 1

    def _manager_stop(self, seconds: float) -> None:
        server = self.server
        if server.is_over or server.is_stopped:
            return
        self.faults["manager stopped"] += 1
        server.is_stopped = True

        def resume() -> None:
            server.is_stopped = False
            server.turn()

        self._for_a_while(seconds, resume)

    def _clock_jump(self, seconds: float) -> None:
        self.faults["manager's clock jumped"] += 1
        self.server.clock_offset_s += seconds

    def _rank_clock_jump(self, ep_rank: int, seconds: float) -> None:
        self.faults["rank's clock jumped"] += 1
        self.server.ranks[ep_rank].clock_offset_s += seconds

    def _second_process(self, ep_rank: int) -> None:
        """A rank's process is started anew, and says hello while the first one lives or is lost."""
        if self.server.is_over:
            return
        self.faults["second process of a rank"] += 1
        rank = self.server.ranks[ep_rank]
        hello = m.HelloMsg(
            ep_rank=ep_rank, incarnation=self.new_number(), pid=1, node="elsewhere",
            weight_version=rank.weight_version, flexfloor_version="1", sglang_version="1", patches=[],
            token=self.server.token, mailbox=None,
        )  # fmt: skip
        self.server.receive(f"second {hello.incarnation}".encode(), m.encode(hello))

    def _server_restart(self, kills: bool) -> None:
        """The manager's process dies, and its ranks with it, or later by themselves."""
        if not self.server.is_over:
            self.faults["server restarted"] += 1
            self._end_server(self.server, kills)


def violation_of(story: Story) -> Violation | None:
    try:
        World(story).run()
    except Violation as violation:
        return violation
    return None


def told(story: Story, violation: Violation) -> str:
    """A failure with its shortest story."""

    def fails(shorter: Story) -> bool:
        found = violation_of(shorter)
        return found is not None and found.invariant == violation.invariant

    return f"{violation}\nThe shortest story that was found for it:\n{shortened(story, fails)}"
