"""Collectives of the played ranks: a gather per iteration, the joiners' agreement, a recovery's barrier."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flexfloor.membership import messages as m

if TYPE_CHECKING:
    from net_rank import SimPlan, SimRank
    from net_world import World


@dataclass
class Collective:
    members: tuple[int, ...]
    here: dict[int, Any] = field(default_factory=dict)
    """ep_rank -> what it brought."""
    left: set[int] = field(default_factory=set)
    """Broke, or died: nobody completes with them any more."""


class Groups:
    def __init__(self, world: "World") -> None:
        self._world = world
        self._rosters: dict[int, tuple[int, ...]] = {}
        self._gathers: dict[int, Collective] = {}
        self._agreements: dict[int, Collective] = {}
        self._barriers: dict[int, Collective] = {}
        self._ranks: dict[int, SimRank] = {}

    def open(self, epoch: int, members: tuple[int, ...]) -> None:
        self._rosters.setdefault(epoch, members)

    def join(self, rank: "SimRank", epoch: int, vote: int) -> None:
        gather = self._gathers.setdefault(epoch, Collective(self._rosters[epoch]))
        self._ranks[rank.ep_rank] = rank
        if gather.left:
            return self._fail_perhaps(rank)
        gather.here[rank.ep_rank] = vote
        if len(gather.here) < len(gather.members):
            return
        votes = [gather.here[member] for member in gather.members]
        gather.here = {}
        ranks = [self._ranks[member] for member in gather.members]
        advances = self._world.checks.gather(ranks)
        for each in ranks:
            self._end_soon(gather, each, each.turn, votes, advances)

    def _end_soon(self, gather: Collective, rank: "SimRank", turn: int, *result: Any) -> None:
        wait_s = self._world.rng.uniform(0.001, 0.02)
        self._world.at(wait_s, lambda: self._end(gather, rank, turn, *result))

    def _end(self, gather: Collective, rank: "SimRank", turn: int, votes: list[int], advances: bool) -> None:
        """A gather that is complete may still fail for a rank, when another one dies before it has all."""
        if gather.left and self._world.rng.random() < 0.5:
            if rank.turn == turn:
                self._fail_perhaps(rank)
            return
        rank._run(turn, lambda: rank.gathered(votes, advances))

    def leave(self, rank: "SimRank") -> None:
        """Its sockets are closed."""
        for gather in (*self._gathers.values(), *self._agreements.values(), *self._barriers.values()):
            if rank.ep_rank in gather.members and rank.ep_rank not in gather.left:
                gather.left.add(rank.ep_rank)
        for gather in self._gathers.values():
            if rank.ep_rank in gather.members:
                waiting, gather.here = gather.here, {}
                for other in waiting:
                    if other != rank.ep_rank:
                        self._fail_perhaps(self._ranks[other])

    def _fail_perhaps(self, rank: "SimRank") -> None:
        """It sees the closed socket, or waits for one that is open until it is told to break."""
        if self._world.rng.random() < 0.6:
            rank._soon(lambda: rank.broke("gather"))

    def agree(self, rank: "SimRank", plan: "SimPlan") -> None:
        agreement = self._agreements.setdefault(plan.membership_epoch, Collective(plan.members))
        if agreement.left:
            return rank.settled(plan, False)
        agreement.here[rank.ep_rank] = (rank, plan, not plan.is_withdrawn)
        if len(agreement.here) < len(agreement.members):
            return
        is_wanted = all(wants for _, _, wants in agreement.here.values())
        for each, its_plan, _ in agreement.here.values():
            wait_s = self._world.rng.uniform(0.001, 0.05)
            self._world.at(wait_s, lambda each=each, its_plan=its_plan: each.settled(its_plan, is_wanted))

    def rebuild(self, rank: "SimRank", order: m.RecoverMsg) -> None:
        barrier = self._barriers.setdefault(order.generation, Collective(order.live))
        self.open(order.membership_epoch, order.members)
        barrier.here[rank.ep_rank] = rank
        if barrier.left or len(barrier.here) < len(barrier.members):
            return
        for each in barrier.here.values():
            each._soon(lambda each=each: each.rebuilt(order), self._world.rng.uniform(0.01, 0.3))
