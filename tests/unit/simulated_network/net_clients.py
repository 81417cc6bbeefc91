"""Requests and weight updates of the simulated network: what a server's main process and a driver do."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from net_rank import SimRank

if TYPE_CHECKING:
    from net_server import Server
    from net_world import World


class Clients:
    """Each response is with one rank, and ends once, however often it is sent anew."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._lengths: list[int] = []
        self._attempts: Counter[int] = Counter()
        self.owners: dict[int, SimRank] = {}
        self.finished: set[int] = set()
        self.num_ignored = 0
        self.num_continued = 0

    def ask(self, length: int) -> None:
        self._lengths.append(length)
        self._submit(len(self._lengths) - 1)

    def length(self, response: int) -> int:
        return self._lengths[response]

    @property
    def num_open(self) -> int:
        return len(self._lengths) - len(self.finished)

    def _submit(self, response: int) -> None:
        self._attempts[response] += 1
        self._route(response, self._attempts[response])

    def _route(self, response: int, attempt: int) -> None:
        server = self._world.server
        if response in self.finished or attempt != self._attempts[response]:
            return
        if not server.routing or server.is_over:
            self._world.at(0.5, lambda: self._route(response, attempt))
            return
        rank = server.ranks[self._world.rng.choice(server.routing)]
        self.owners[response] = rank
        # Some are long on their way, so that they reach ranks that are about to leave.
        wait_s = self._world.rng.uniform(0.001, self._world.rng.choice((0.1, 0.5, 3.0)))
        self._world.at(wait_s, lambda: self._arrive(response, rank))

    def _arrive(self, response: int, rank: SimRank) -> None:
        if self.owners[response] is not rank:
            return
        if str(rank.server.membership.ranks[rank.ep_rank].state) in ("exited", "lost"):
            # The server ends it at once.
            self._world.at(0.5, lambda: self._continue(response, rank))
        elif rank.is_alive and rank.place != "exiting":
            rank.requests.append(response)
            rank.wake()
        else:
            # Nobody knows yet that the process is gone: it lies in the socket until then.
            self._world.at(0.5, lambda: self._arrive(response, rank))

    def _continue(self, response: int, rank: SimRank) -> None:
        if self.owners[response] is rank and response not in self.finished:
            self.num_continued += 1
            self._submit(response)

    def abandon(self, rank: SimRank) -> None:
        """What the rank has ends aborted, and is sent anew under its own id."""
        for response, owner in self.owners.items():
            if owner is rank and response not in self.finished:
                self._world.at(0.05, lambda response=response: self._continue(response, rank))

    def finish(self, response: int, rank: SimRank) -> None:
        if self.owners[response] is not rank or rank.server is not self._world.server:
            self.num_ignored += 1
            return
        self._world.checks.hold(response not in self.finished, f"response {response} ended twice")
        self.finished.add(response)


@dataclass
class Update:
    server: "Server"
    name: str
    version: int
    waits_for: set[int] = field(default_factory=set)
    is_granted: bool = False
    is_over: bool = False


class Updates:
    """A weight update stops the work, reaches each rank in its own time, and ends with the last."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._version = 0
        self.all: list[Update] = []

    @property
    def version(self) -> int:
        return self._version

    def start(self) -> None:
        server = self._world.server
        if any(not update.is_over for update in self.all) or not server.membership.is_ready:
            return
        self._version += 1
        update = Update(server, f"update{self._version}", self._version)
        self.all.append(update)
        future = server.fence(update.name, True, lambda: self._granted(update))
        future.add_done_callback(lambda done: self._end(update) if done.exception() else None)

    def is_running(self, server: "Server") -> bool:
        return any(u.is_granted and not u.is_over and u.server is server for u in self.all)

    def _granted(self, update: Update) -> None:
        server = update.server
        states = {str(rank.state) for rank in server.membership.ranks}
        if update.is_over or server.is_over or states & {"lost", "exited"}:
            # As the server refuses it: the lost rank's experts could not be updated.
            return self._end(update)
        update.is_granted = True
        update.waits_for = {*server.membership.members}
        for ep_rank in server.membership.members:
            rank = server.ranks[ep_rank]
            wait_s = self._world.rng.uniform(0.001, 0.6)
            self._world.at(wait_s, lambda rank=rank: rank.controls.append(lambda r: self._apply(update, r)))

    def _apply(self, update: Update, rank: SimRank) -> None:
        if not update.is_over:
            rank.weight_version = update.version
            self._world.at(self._world.rng.uniform(0.001, 0.1), lambda: self._applied(update, rank.ep_rank))

    def _applied(self, update: Update, ep_rank: int) -> None:
        update.waits_for.discard(ep_rank)
        if update.waits_for or update.is_over:
            return
        server = update.server
        server.call(lambda: server.exchange.update_weights(update.version))
        self._end(update)

    def rank_lost(self, server: "Server") -> None:
        for update in self.all:
            if update.server is server and update.is_granted and not update.is_over:
                self._world.at(0.0, lambda update=update: self._end(update))

    def _end(self, update: Update) -> None:
        if not update.is_over:
            update.is_over = True
            if not update.server.is_over:
                update.server.unfence(update.name)
