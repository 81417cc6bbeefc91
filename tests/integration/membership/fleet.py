"""A manager and agents that play schedulers: real threads and sockets, and a model loop that the test turns.

`turn` is one iteration of every rank: orders first, then the gather in which the members vote.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import zmq

from flexfloor.membership import messages as m
from flexfloor.membership.agent import AgentLink
from flexfloor.membership.endpoint import Endpoint
from flexfloor.membership.manager import Manager
from flexfloor.membership.state import Membership

DEADLINE_S = 20.0


def hello(ep_rank: int, **changes: object) -> m.HelloMsg:
    fields = {
        "ep_rank": ep_rank,
        "incarnation": 100 + ep_rank,
        "pid": 1,
        "node": f"node{ep_rank // 2}",
        "weight_version": 0,
        "flexfloor_version": "0.1.0",
        "sglang_version": "0.5.23",
        "patches": ["sglang.a"],
        "mailbox": f"box{ep_rank}",
    }
    return m.HelloMsg(**{**fields, **changes})


@dataclass
class FakeRank:
    link: AgentLink
    ep_rank: int
    epoch: int = 0
    is_member: bool = True
    is_draining: bool = False
    has_reported: bool = False
    num_work: int = 0
    """Requests here; the test takes them away."""
    votes: bool = True
    plan: m.PrepareMsg | None = None
    has_asked: bool = False
    breaks: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """What the link's thread was told at once."""
    recovers: bool = True

    @classmethod
    def of(cls, endpoint: Endpoint, message: m.HelloMsg) -> Self:
        breaks: list[tuple[int, tuple[int, ...]]] = []
        link = AgentLink(
            endpoint.for_peer(), message, heartbeat_s=0.1, on_break=lambda *order: breaks.append(order)
        )
        return cls(link, message.ep_rank, breaks=breaks)

    def loop_top(self) -> None:
        self.link.beat()
        for order in self.link.orders():
            self._obey(order)
        is_leaver = self.plan is not None and self.ep_rank not in self.plan.members
        if is_leaver and self.num_work and self.is_member and not self.has_asked:
            self.has_asked, self.has_reported = True, False
            self.link.send(m.CancelAskedMsg(self.plan.membership_epoch))
        elif self.is_draining and self.is_member:
            self._report(m.DrainFinishedMsg(), not self.num_work)
        elif not self.is_member:
            self._report(m.WorkArrivedMsg(), self.num_work > 0)

    def vote(self) -> int:
        is_busy = self.plan is not None and self.ep_rank not in self.plan.members and self.num_work
        return self.epoch if self.plan is None or is_busy or not self.votes else self.plan.membership_epoch

    def switch(self, plan: m.PrepareMsg) -> None:
        self.epoch, self.plan, self.has_reported = plan.membership_epoch, None, False
        self.is_member = self.ep_rank in plan.members
        self.is_draining = self.is_draining and self.is_member
        self.link.send(m.SwitchedMsg(plan.membership_epoch, 0.01, 8))

    def _obey(self, order: m.OrderMsg) -> None:
        match order:
            case m.StartDrainMsg():
                self.is_draining, self.has_reported = True, False
            case m.StopDrainMsg():
                self.is_draining = False
            case m.PrepareMsg():
                self.plan, self.has_asked = order, False
            case m.CancelMsg():
                is_dropped, self.plan = self.plan is not None, None
                self.link.send(m.CancelAnsweredMsg(order.membership_epoch, is_dropped))
            case m.BreakMsg():
                self.plan = None
                self.link.send(self.broken(order.generation))
            case m.RecoverMsg() if self.recovers:
                self.recover(order)
            case m.ManagerLostMsg():
                raise AssertionError(order.reason)

    def broken(self, generation: int) -> m.BrokenMsg:
        return m.BrokenMsg(
            generation=generation,
            membership_epoch=self.epoch,
            slots=(self.ep_rank,) if self.is_member else (),
            weight_version=0,
            where="gather",
        )

    def recover(self, order: m.RecoverMsg) -> None:
        self.epoch, self.is_member = order.membership_epoch, self.ep_rank in order.members
        self.is_draining = self.has_reported = False
        generation, epoch = order.generation, order.membership_epoch
        self.link.send(
            m.RecoveredMsg(generation=generation, membership_epoch=epoch, stall_s=0.01, num_bytes=4)
        )

    def _report(self, message: m.ReportMsg, is_so: bool) -> None:
        if is_so and not self.has_reported:
            self.has_reported = True
            self.link.send(message)


class Fleet:
    def __init__(
        self,
        endpoint: Endpoint,
        ep_size: int = 3,
        *,
        floor: int = 1,
        prepare_timeout_s: float = 60.0,
        heartbeat_timeout_s: float = 60.0,
        recovers: bool = True,
        hellos: dict[int, dict[str, object]] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.routings: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """(ranks that are routed to, members)"""
        self.failures: list[str] = []
        self.abandoned: list[int] = []
        membership = Membership(
            ep_size, floor, num_experts=ep_size, prepare_timeout_s=prepare_timeout_s, recovers=recovers
        )
        self.manager = Manager(
            endpoint,
            membership,
            on_routing=lambda ranks, members: self.routings.append((ranks, members)),
            on_fail=self.failures.append,
            on_abandon=self.abandoned.append,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        self.ranks = [
            FakeRank.of(endpoint, hello(rank, **(hellos or {}).get(rank, {}))) for rank in range(ep_size)
        ]
        self._poller = zmq.Poller()

    def __enter__(self) -> Self:
        self.manager.start()
        for rank in self.ranks:
            rank.link.start()
            self._poller.register(rank.link.wake_fd, zmq.POLLIN)
        self.manager.wait_ready(DEADLINE_S)
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self.ranks:
            rank.link.close()
        self.manager.close()

    def turn(self) -> None:
        for rank in self.ranks:
            rank.loop_top()
        members = [rank for rank in self.ranks if rank.is_member]
        votes = {rank.vote() for rank in members}
        plan = members[0].plan
        if len(votes) != 1 or plan is None or votes != {plan.membership_epoch}:
            return
        there = [rank for rank in self.ranks if rank.plan is not None]
        if {rank.ep_rank for rank in there} == {*plan.old_members, *plan.members}:
            for rank in there:
                rank.switch(plan)

    def turn_until(self, is_there: Callable[[], object]) -> None:
        """Turn the loop, woken by orders, until it is so."""
        end_s = time.monotonic() + DEADLINE_S
        while not is_there():
            assert time.monotonic() < end_s, self.manager.status()
            self.turn()
            self._poller.poll(5)

    def finish(self, future):
        self.turn_until(future.done)
        return future.result(0)

    @property
    def members(self) -> tuple[int, ...]:
        return self.manager.status().members
