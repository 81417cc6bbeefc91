"""A group of ranks that follow the switch protocol, in simulated time: messages take their time, requests
arrive by a routing that may be old, and one gather per iteration decides.

What an agent does here is what a real one must do: it changes its mind at the top of an iteration only, a
leaver that has work votes for the group in force, an agreed switch comes before everything else.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flexfloor.membership import commands as c
from flexfloor.membership import events as e
from flexfloor.membership.state import Membership

ITERATION_S = 0.05
REQUEST_DELAY_S = 3.0


@dataclass
class SimAgent:
    ep_rank: int
    epoch: int = 0
    is_member: bool = True
    has_exited: bool = False
    is_draining: bool = False
    has_reported: bool = False
    """DrainFinished or WorkArrived was said, and nothing has changed since."""
    plan: c.Prepare | None = None
    has_agreed: bool = False
    has_asked: bool = False
    inbox: list[Any] = field(default_factory=list)
    work: list[int] = field(default_factory=list)
    """Iterations that each request still needs."""

    @property
    def is_leaver(self) -> bool:
        return self.plan is not None and self.ep_rank not in self.plan.members

    @property
    def vote(self) -> int:
        if self.plan is None or (self.is_leaver and (self.work or not self.is_draining)):
            return self.epoch
        return self.plan.membership_epoch


class SimGroup:
    def __init__(
        self, seed: int, *, ep_size: int, floor: int, delay_s: float, prepare_timeout_s: float
    ) -> None:
        self.rng = random.Random(seed)
        self.delay_s = delay_s
        self.membership = Membership(
            ep_size,
            floor,
            num_experts=ep_size,
            prepare_timeout_s=prepare_timeout_s,
            cancel_timeout_s=1000,
            switch_timeout_s=1000,
        )
        self.agents = [SimAgent(rank) for rank in range(ep_size)]
        self.now_s = 0.0
        self.routing = tuple(range(ep_size))
        self.results: dict[str, c.FinishOperation] = {}
        self.fences: set[str] = set()
        self.num_served = 0
        self.num_cancels = 0
        self.num_wakes = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._link_free_s: dict[tuple[int, bool], float] = {}
        for agent in self.agents:
            self._feed(e.RankJoined(**self._life(agent), weight_version=0))

    # Time.

    def at(self, wait_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + wait_s, next(self._order), action))

    @property
    def is_at_rest(self) -> bool:
        """Nothing is under way, and nothing would ever happen again."""
        membership = self.membership
        is_open = membership.change or membership.operations.open or membership.fences.num_all
        return not (is_open or self._queue or any(agent.work or agent.inbox for agent in self.agents))

    def run(self, until_s: float) -> None:
        """Up to then or to rest: an iteration of whoever is whole every ITERATION_S."""
        while self.now_s < until_s and not (self.is_at_rest and self.now_s):
            self.now_s += ITERATION_S
            while self._queue and self._queue[0][0] <= self.now_s:
                heapq.heappop(self._queue)[2]()
            self._feed(e.TimePassed(at=self.now_s))
            self._iterate()

    def _send(self, agent: SimAgent, to_manager: bool, action: Callable[[], None]) -> None:
        """A link keeps its order, whatever the delays."""
        link = (agent.ep_rank, to_manager)
        arrives_s = max(self._link_free_s.get(link, 0.0), self.now_s + self.rng.uniform(0, self.delay_s))
        self._link_free_s[link] = arrives_s
        self.at(arrives_s - self.now_s, action)

    # The manager's side.

    def _feed(self, event: e.Event) -> None:
        commands = self.membership.handle(event)
        self.membership.validate()
        for command in commands:
            self._execute(command)

    def _execute(self, command: c.Command) -> None:
        match command:
            case c.SetRouting():
                self.routing = command.ep_ranks
            case c.StartDrain() | c.StopDrain():
                self._order_agent(command.ep_rank, command)
            case c.Prepare() | c.Cancel():
                self.num_cancels += isinstance(command, c.Cancel)
                for ep_rank in command.targets:
                    self._order_agent(ep_rank, command)
            case c.FinishOperation():
                self.results[command.operation_id] = command
            case c.GrantFence():
                self.fences.add(command.fence_id)
                self.at(self.rng.uniform(0, 1), lambda: self._unfence(command.fence_id))
            case _:
                raise AssertionError(f"unexpected {command}")

    def _order_agent(self, ep_rank: int, command: c.Command) -> None:
        agent = self.agents[ep_rank]
        self._send(agent, False, lambda: agent.inbox.append(command))

    def _unfence(self, fence_id: str) -> None:
        self._feed(e.FenceReleased(fence_id=fence_id, at=self.now_s))

    def release(self, name: str, ep_ranks: tuple[int, ...]) -> None:
        self._feed(e.ReleaseRequested(operation_id=name, ep_ranks=ep_ranks, at=self.now_s))

    def rejoin(self, name: str, ep_ranks: tuple[int, ...]) -> None:
        self._feed(e.RejoinRequested(operation_id=name, ep_ranks=ep_ranks, at=self.now_s))

    def fence(self, name: str, full: bool) -> None:
        self._feed(e.FenceRequested(fence_id=name, full=full, at=self.now_s))

    def request(self, num_iterations: int) -> None:
        """Goes to a rank of the routing in force now, and arrives when it has changed."""
        agent = self.agents[self.rng.choice(self.routing)]
        self.at(self.rng.uniform(0, REQUEST_DELAY_S), lambda: agent.work.append(num_iterations))

    # The ranks' side.

    def _iterate(self) -> None:
        members = [agent for agent in self.agents if agent.is_member]
        if all(agent.has_agreed for agent in members):
            self._switch(members)
            members = [agent for agent in self.agents if agent.is_member]
        for agent in self.agents:
            if not agent.has_agreed:
                self._loop_top(agent)
        for agent in members:
            agent.work = [left - 1 for left in agent.work if left > 1]
        votes = {agent.vote for agent in members}
        assert len({agent.epoch for agent in members}) == 1, "members run in different groups"
        if len(votes) == 1 and votes.pop() > members[0].epoch:
            for agent in members:
                agent.has_agreed = True

    def _switch(self, members: list[SimAgent]) -> None:
        plan = members[0].plan
        assert plan is not None
        joiners = [self.agents[rank] for rank in plan.members if rank not in plan.old_members]
        for agent in joiners:
            self._loop_top(agent)
        if any(agent.plan != plan for agent in joiners):
            return  # the new group's first collective waits for them
        for agent in (*members, *joiners):
            agent.epoch, agent.plan, agent.has_agreed = plan.membership_epoch, None, False
            agent.is_member = agent.ep_rank in plan.members
            agent.is_draining = agent.is_draining and agent.is_member
            agent.has_reported = agent.has_asked = False
            self._say(agent, e.RankSwitched, membership_epoch=agent.epoch, stall_s=0.01, num_bytes=1)

    def _loop_top(self, agent: SimAgent) -> None:
        orders, agent.inbox = agent.inbox, []
        for order in orders:
            self._obey(agent, order)
        if not agent.is_member:
            self._say_once(agent, e.WorkArrived, bool(agent.work))
        elif agent.is_leaver and agent.work and not agent.has_asked:
            agent.has_asked, agent.has_reported = True, False
            self._say(agent, e.CancelAsked, membership_epoch=agent.plan.membership_epoch)
        elif agent.is_draining:
            if agent.work and agent.has_reported:
                agent.has_reported = False
                self._say(agent, e.WorkArrived)
            self._say_once(agent, e.DrainFinished, not agent.work)

    def _obey(self, agent: SimAgent, order: c.Command) -> None:
        match order:
            case c.StartDrain():
                agent.is_draining, agent.has_reported = True, False
            case c.StopDrain():
                agent.is_draining = False
            case c.Prepare():
                agent.plan, agent.has_asked = order, False
            case c.Cancel():
                is_dropped = agent.plan is not None
                agent.plan = None
                self._say(
                    agent, e.CancelAnswered, membership_epoch=order.membership_epoch, dropped=is_dropped
                )

    def _say_once(self, agent: SimAgent, kind: type[e.RankEvent], is_so: bool) -> None:
        if is_so and not agent.has_reported:
            agent.has_reported = True
            self.num_wakes += kind is e.WorkArrived
            self._say(agent, kind)

    def _say(self, agent: SimAgent, kind: type[e.RankEvent], **fields: Any) -> None:
        self._send(agent, True, lambda: self._feed(kind(**self._life(agent), **fields)))

    def _life(self, agent: SimAgent) -> dict[str, Any]:
        return {"ep_rank": agent.ep_rank, "incarnation": 1, "at": self.now_s}
