"""One rank in the simulated network: the real link's rules and the real Member, around a played model.

The model's iteration is a gather of the group in force. A gather of a group with a dead or broken member
fails for some at once and keeps the others waiting until they are told to break, as sockets do.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flexfloor.membership import messages as m
from flexfloor.membership.link_state import LinkState
from flexfloor.membership.member import Member
from flexfloor.membership.steady_clock import SteadyClock

if TYPE_CHECKING:
    from net_server import Server

ITERATION_S = 0.4
HEARTBEAT_S = 1.5
MANAGER_TIMEOUT_S = 15.0
LAST_WORDS_S = 6.0


@dataclass
class Flag:
    value: bool = False

    def is_set(self) -> bool:
        return self.value


@dataclass
class SimPlan:
    order: m.PrepareMsg
    ready: Flag = field(default_factory=Flag)
    dropped: Flag = field(default_factory=Flag)
    is_withdrawn: bool = False
    agreed: bool = False
    cancel_asked: bool = False

    @property
    def membership_epoch(self) -> int:
        return self.order.membership_epoch

    @property
    def members(self) -> tuple[int, ...]:
        return self.order.members

    @property
    def joiners(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.order.members) - set(self.order.old_members)))


class SimRank:
    def __init__(self, server: "Server", ep_rank: int, incarnation: int, node: str) -> None:
        self.server, self.world = server, server.world
        self.ep_rank, self.incarnation = ep_rank, incarnation
        self.identity = f"{server.number}/{ep_rank}/{incarnation}".encode()
        self.is_alive, self.is_stopped = True, False
        self.clock_offset_s = 0.0
        self.place = "top"
        """top, gather, broken, rebuild, parked: where the model's thread is."""
        self.slots: tuple[int | None, ...] = server.membership.placement.experts_on(ep_rank)
        self.weight_version = server.version_at_start
        self.inbox: deque[bytes] = deque()
        self.orders: deque[m.OrderMsg] = deque()
        self.requests: deque[int] = deque()
        """Not received yet."""
        self.controls: deque[Any] = deque()
        self.work: dict[int, int] = {}
        """Response -> iterations left."""
        self.has_told_work = False
        self.turn = 0
        """Grows whenever the model's thread moves on: what was under way for it before is void."""
        self.clock = SteadyClock(lambda: self.world.now_s + self.clock_offset_s)
        self.member: Member[SimPlan] = Member(ep_rank, self.report, self._prepare)
        hello = m.HelloMsg(
            ep_rank=ep_rank, incarnation=incarnation, pid=incarnation, node=node,
            weight_version=self.weight_version, flexfloor_version="1", sglang_version="1", patches=[],
            token=server.token, mailbox=None,
        )  # fmt: skip
        self.link = LinkState(
            hello,
            MANAGER_TIMEOUT_S,
            self.clock(),
            say=self._say,
            deliver=self._deliver,
            on_break=self._on_break,
        )
        self._reported = -1
        self._recover_order: m.RecoverMsg | None = None
        self.link.open()
        self._beat()
        self._soon(self.loop_top)

    # Time and life.

    def _soon(self, action: Any, wait_s: float | None = None) -> None:
        """For the model's thread: void when it has moved on by then, put off while the process is stopped."""
        turn = self.turn
        wait_s = self.world.rng.uniform(0.001, 0.02) if wait_s is None else wait_s
        self.world.at(wait_s, lambda: self._run(turn, action))

    def _run(self, turn: int, action: Any) -> None:
        if not self.is_alive or turn != self.turn:
            return
        if self.is_stopped:
            self.world.at(0.2, lambda: self._run(turn, action))
            return
        try:
            action()
        except RuntimeError:
            self.die()

    def _move_on(self, place: str) -> None:
        self.turn += 1
        self.place = place

    def die(self) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        self._move_on("dead")
        self.world.process_ended(self)

    def is_drained(self) -> bool:
        return not self.work

    # The link.

    def _say(self, message: Any) -> None:
        self.world.send_to_manager(self, m.encode(message))

    def report(self, message: m.ReportMsg) -> None:
        self.link.report(message, self.clock())

    def _beat(self) -> None:
        if not self.is_alive:
            return
        if not self.is_stopped:
            self.clock.woke()
            self.take_frames()
            if silence := self.link.beat(0.0, self.clock()):
                self.link.lose_manager(f"silent {silence}")
        if not self.is_stopped:
            self.clock.sleeps_until(self.clock() + HEARTBEAT_S)
        self.world.at(HEARTBEAT_S, self._beat)

    def take_frames(self) -> None:
        while self.inbox and self.is_alive and not self.is_stopped:
            self.link.take(m.decode_to_agent([self.inbox.popleft()]), self.clock())

    def _deliver(self, order: m.OrderMsg) -> None:
        self.orders.append(order)
        self.wake()

    def wake(self) -> None:
        if self.place == "parked":
            self._soon(self.parked)
        elif self.place == "broken":
            self._soon(self._wait_recover)

    def _on_break(self, generation: int, _lost: tuple[int, ...]) -> None:
        if self.place == "gather":
            self._move_on("failing")
            self._soon(lambda: self.broke("gather, told to break"))
        elif self.place == "rebuild":
            self._move_on("failing")
            self._soon(lambda: self.broke("recovery, told to break"))

    # The model's loop.

    def loop_top(self) -> None:
        self._move_on("top")
        if plan := self.member.due_switch:
            self._switch(plan)
            if self.place != "top":
                return
        while self.orders:
            self.member.take(self.orders.popleft())
        if self.member.must_recover:
            return self.broke("loop top")
        self.member.settle(self.is_drained)
        while self.requests:
            response = self.requests.popleft()
            self.work[response] = self.world.clients.length(response)
        while self.controls:
            self.controls.popleft()(self)
        self._move_on("gather")
        vote = self.member.vote(len(self.work), self.is_drained)
        self.server.groups.join(self, self.member.epoch, vote)

    def gathered(self, votes: list[int], advances: bool) -> None:
        self._move_on("top")
        self.member.read_votes(votes)
        if advances:
            for response in list(self.work):
                self.work[response] -= 1
                if not self.work[response]:
                    del self.work[response]
                    self.world.clients.finish(response, self)
        self._soon(self.loop_top, ITERATION_S)

    def _switch(self, plan: SimPlan) -> None:
        stays = self.member.switch(plan)
        self.slots = plan.order.new_placement.experts_on(self.ep_rank) if stays else ()
        self.report(m.SwitchedMsg(plan.membership_epoch, 0.01, 1))
        self.world.checks.entered(self, plan.membership_epoch, plan.members)
        if stays:
            return
        self.world.checks.that("leaver_is_free", not self.work, f"ep_rank {self.ep_rank}: {self.work}")
        self._move_on("parked")
        self.has_told_work = False
        if self.ep_rank in plan.order.leavers_exit:
            self._move_on("exiting")
            self._exit(self.world.now_s + LAST_WORDS_S)
        else:
            self._soon(self.parked)

    def _exit(self, end_s: float) -> None:
        """As AgentLink.close does."""
        if self.link.is_all_heard or self.world.now_s >= end_s:
            return self.die()
        if not self.is_stopped:
            self.link.beat(0.0, self.clock())
        self._soon(lambda: self._exit(end_s), 0.2)

    def parked(self) -> None:
        self.turn += 1
        if self.requests and not self.has_told_work:
            self.has_told_work = True
            self.member.work_arrived()
        while self.orders:
            self.member.take(self.orders.popleft())
        if self.member.must_recover:
            return self.broke("parked")
        self.member.settle_withdrawn()
        if plan := self.member.due_return:
            self._move_on("top")
            self._switch(plan)
            self.loop_top()

    # Plans.

    def _prepare(self, order: m.PrepareMsg) -> SimPlan:
        plan = SimPlan(order)
        self.world.at(self.world.rng.uniform(0.02, 0.4), lambda: self._prepared(plan))
        return plan

    def _prepared(self, plan: SimPlan) -> None:
        if not self.is_alive or self.member.plan is not plan:
            return
        if self.is_stopped:
            self.world.at(0.2, lambda: self._prepared(plan))
        elif plan.joiners and self.ep_rank in plan.members:
            self.server.groups.agree(self, plan)
        else:
            plan.ready.value = True

    def settled(self, plan: SimPlan, is_wanted: bool) -> None:
        (plan.ready if is_wanted else plan.dropped).value = True
        self.wake()

    # Recoveries.

    def broke(self, where: str) -> None:
        self._move_on("broken")
        self.where = where
        self.server.groups.leave(self)
        self.member.drop_plan()
        self._reported = -1
        self._wait_recover()

    def _wait_recover(self) -> None:
        """As AgentLink.wait_recover does."""
        if self.link.generation > self._reported:
            self._reported = self.link.generation
            self.report(
                self.member.broken(
                    self._reported, slots=self.slots, weight_version=self.weight_version, where=self.where
                )
            )
        while self.orders:
            order = self.orders.popleft()
            if isinstance(order, m.ManagerLostMsg):
                raise RuntimeError(order.reason)
            if isinstance(order, m.RecoverMsg) and order.generation == self.link.generation:
                self._recover_order = order
                self._move_on("rebuild")
                self.server.groups.rebuild(self, order)
                return

    def rebuilt(self, order: m.RecoverMsg) -> None:
        is_in = self.member.recover(order)
        self.slots = order.placement.experts_on(self.ep_rank) if is_in else ()
        generation, epoch = order.generation, order.membership_epoch
        self.report(m.RecoveredMsg(generation=generation, membership_epoch=epoch, stall_s=0.1, num_bytes=1))
        self.world.checks.entered(self, epoch, order.members)
        self._move_on("top" if is_in else "parked")
        self.has_told_work = False
        self._soon(self.loop_top if is_in else self.parked)
