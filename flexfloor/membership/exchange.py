"""The manager's thread at work: messages and requests in, Membership asked, its commands carried out.

Nothing here is thread-safe; `Manager` sees to it that one thread only comes here.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec
import zmq

from flexfloor.membership import commands as c
from flexfloor.membership import events as e
from flexfloor.membership import messages as m
from flexfloor.membership.errors import FenceRefused, MembershipFailed
from flexfloor.membership.events import Leave, WeightVersion
from flexfloor.membership.lookout import Lookout
from flexfloor.membership.peers import AgentPeer, Peers
from flexfloor.membership.state import InvalidTransition, Membership, Outcome, RankState
from flexfloor.membership.status import MembershipStatus, OperationResult
from flexfloor.membership.steady_clock import SteadyClock
from flexfloor.membership.wire import Wire

logger = logging.getLogger(__name__)

_RECOVERY_EVENTS: dict[type, Callable[..., e.RankEvent]] = {
    m.BrokenMsg: e.RankBroke,
    m.RecoveredMsg: e.RankRecovered,
    m.RecoveryFailedMsg: e.RecoveryFailed,
}

Waiter = Future[OperationResult] | bytes
"""Of a result: a future of this process, or the identity of a client."""


class Exchange:
    """See Manager for the arguments."""

    def __init__(
        self,
        socket: Wire,
        membership: Membership,
        peers: Peers,
        lookout: Lookout,
        *,
        on_routing: Callable[[tuple[int, ...], tuple[int, ...]], None],
        on_fail: Callable[[str], None],
        on_status: Callable[[MembershipStatus], None],
        on_result: Callable[[OperationResult], None],
        on_abandon: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        self._socket = socket
        self._membership = membership
        self._peers = peers
        self._lookout = lookout
        self._on_routing = on_routing
        self._on_fail = on_fail
        self._on_status = on_status
        self._on_result = on_result
        self._on_abandon = on_abandon
        self._clock = SteadyClock(clock)
        self.is_ending = False
        """The server ends: no rank is lost from now on."""
        self._events: deque[e.Event] = deque()
        self._is_feeding = False
        self._waiters: dict[str, list[Waiter]] = {}
        self._fences: dict[str, Future[str]] = {}
        self._last_counters: dict[int, dict[str, int]] = {}
        self.status = membership.status()
        """As of the last event; replaced, never changed."""
        self.refusals: deque[str] = deque(maxlen=20)
        """Of hellos."""
        self.is_settled = threading.Event()
        """Ready, failed or closed."""
        self.end_reason: str | None = None

    def woke(self) -> None:
        """Before anything else after `poll_ms`."""
        if skipped_s := self._clock.woke():
            logger.warning("the manager stood still for %.1f s, which count for no deadline", skipped_s)

    def turn(self) -> None:
        """Everything that is due."""
        # Heartbeats that came while this process was stopped must count before the silence does.
        while self._socket.poll(0):
            identity, *frames = self._socket.recv_multipart()
            self._take(identity, frames)
        if self._is_watching:
            for peer, reason in self._lookout.lost(self._clock(), self._is_exiting):
                self._lose(peer, reason)
        deadline_s = self._membership.next_deadline_s
        if deadline_s is not None and self._clock() >= deadline_s:
            self.feed(e.TimePassed(at=self._clock()))

    def poll_ms(self) -> int | None:
        """Until something is due by the clock."""
        watch_s = self._lookout.next_deadline_s() if self._is_watching else None
        deadlines_s = [at_s for at_s in (watch_s, self._membership.next_deadline_s) if at_s is not None]
        self._clock.sleeps_until(min(deadlines_s, default=None))
        if not deadlines_s:
            return None
        return int(1000 * max(0.0, min(deadlines_s) - self._clock())) + 1

    def start_release(self, name: str, ep_ranks: tuple[int, ...], leave: Leave, waiter: Waiter) -> None:
        self._waiters.setdefault(name, []).append(waiter)
        self.feed(e.ReleaseRequested(operation_id=name, ep_ranks=ep_ranks, leave=leave, at=self._clock()))

    def start_rejoin(self, name: str, ep_ranks: tuple[int, ...], waiter: Waiter) -> None:
        self._waiters.setdefault(name, []).append(waiter)
        self.feed(e.RejoinRequested(operation_id=name, ep_ranks=ep_ranks, at=self._clock()))

    def start_fence(self, fence_id: str, full: bool, future: Future[str]) -> None:
        self._fences[fence_id] = future
        self.feed(e.FenceRequested(fence_id=fence_id, full=full, at=self._clock()))

    def release_fence(self, fence_id: str) -> None:
        self.feed(e.FenceReleased(fence_id=fence_id, at=self._clock()))

    def update_weights(self, version: WeightVersion) -> None:
        self.feed(e.WeightsUpdated(weight_version=version, at=self._clock()))

    def feed(self, event: e.Event) -> None:
        """Events that come of carrying out commands wait until the commands before them are through."""
        self._events.append(event)
        if self._is_feeding:
            return
        self._is_feeding = True
        try:
            while self._events:
                self._handle(self._events.popleft())
        finally:
            self._is_feeding = False

    def end(self, reason: str) -> None:
        """The group cannot go on, or this thread cannot."""
        if self.end_reason is None:
            self.end_reason = reason
            self.is_settled.set()
            self._on_fail(reason)

    def close(self) -> None:
        """Nobody will answer after this."""
        self.end_reason = self.end_reason or "the manager is closed"
        self.is_settled.set()
        futures: list[Future[Any]] = list(self._fences.values())
        for waiters in self._waiters.values():
            futures += [waiter for waiter in waiters if isinstance(waiter, Future)]
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(MembershipFailed(self.end_reason))

    @property
    def _is_watching(self) -> bool:
        return self._membership.failed is None and not self.is_ending

    def _is_exiting(self, ep_rank: int) -> bool:
        rank = self._membership.ranks[ep_rank]
        return rank.state is RankState.draining and rank.leave is Leave.exit

    def _lose(self, peer: AgentPeer, reason: str) -> None:
        if self.is_ending:
            return
        peer.is_watched = False
        peer.lost_reason = peer.lost_reason or reason
        self.feed(e.RankLost(**self._life(peer), reason=reason))

    # Events in.

    def _take(self, identity: bytes, frames: list[bytes]) -> None:
        message = self._peers.admit(identity, frames)
        match message:
            case None:
                pass
            case m.HelloMsg():
                self._take_hello(identity, message)
            case m.ClientHelloMsg():
                self._peers.add_client(identity)
            case m.ReleaseMsg():
                self.start_release(message.operation_id, message.ep_ranks, message.leave, identity)
            case m.RejoinMsg():
                self.start_rejoin(message.operation_id, message.ep_ranks, identity)
            case m.StatusRequestMsg():
                self._send(identity, m.StatusMsg(self.status, message.request_id))
            case _:
                peer = self._peers.agent(identity)
                assert peer is not None, "admitted as an agent"
                self._take_from_agent(peer, message)

    def _take_hello(self, identity: bytes, hello: m.HelloMsg) -> None:
        reason = ""
        if not 0 <= hello.ep_rank < self._membership.ep_size:
            reason = f"there is no ep_rank {hello.ep_rank} of {self._membership.ep_size}"
        reason = reason or self._peers.mismatch(hello)
        if not reason:
            now_s = self._clock()
            peer = self._peers.agents.get(hello.ep_rank)
            if peer is None:
                # Known before the event, whose commands may go to it.
                self._peers.add_agent(identity, hello, now_s)
            self.feed(
                e.RankJoined(
                    ep_rank=hello.ep_rank,
                    incarnation=hello.incarnation,
                    weight_version=hello.weight_version,
                    at=now_s,
                )
            )
            is_refused = self._membership.outcome is Outcome.refused
            reason = self._membership.outcome_reason if is_refused else ""
            if not is_refused:
                self._peers.add_agent(identity, hello, now_s)
                self._lookout.add(self._peers.agents[hello.ep_rank])
        if reason:
            logger.warning("ep_rank=%d hello refused: %s", hello.ep_rank, reason)
            self.refusals.append(reason)
            self._send(identity, m.RefusedMsg(reason=reason))
        else:
            self._send(identity, m.WelcomeMsg(membership_epoch=self._membership.membership_epoch))

    def _take_from_agent(self, peer: AgentPeer, message: m.HeartbeatMsg | m.NumberedReportMsg) -> None:
        if self._membership.ranks[peer.ep_rank].state is RankState.lost:
            # It lives, and the group goes on without it: it must end.
            self._send(peer.identity, m.RefusedMsg(f"ep_rank {peer.ep_rank} is lost: {peer.lost_reason}"))
            return
        peer.seen_at_s = now_s = self._clock()
        peer.session.hear(message.heard)
        if isinstance(message, m.NumberedReportMsg):
            for report in peer.session.take(message.number, message.report):
                self._take_report(peer, report)
            return
        peer.loop_age_s = message.loop_age_s
        self._send(peer.identity, m.AliveMsg(peer.session.heard))
        for number, order in peer.session.due(now_s):
            self._send(peer.identity, m.NumberedOrderMsg(number, peer.session.heard, order))

    def _take_report(self, peer: AgentPeer, message: m.ReportMsg) -> None:
        life = self._life(peer)
        match message:
            case m.GoodbyeMsg():
                self._lose(peer, f"it said goodbye: {message.reason}")
            case m.DrainFinishedMsg():
                self.feed(e.DrainFinished(**life))
            case m.WorkArrivedMsg():
                self.feed(e.WorkArrived(**life))
            case m.CancelAskedMsg():
                self.feed(e.CancelAsked(**life, membership_epoch=message.membership_epoch))
            case m.CancelAnsweredMsg():
                epoch, dropped = message.membership_epoch, message.dropped
                self.feed(e.CancelAnswered(**life, membership_epoch=epoch, dropped=dropped))
            case m.BrokenMsg() | m.RecoveredMsg() | m.RecoveryFailedMsg():
                event = _RECOVERY_EVENTS[type(message)]
                self.feed(event(**life, **msgspec.structs.asdict(message)))
            case m.SwitchedMsg():
                if message.last_counters:
                    self._last_counters[peer.ep_rank] = message.last_counters
                self.feed(
                    e.RankSwitched(
                        **life,
                        membership_epoch=message.membership_epoch,
                        stall_s=message.stall_s,
                        num_bytes=message.num_bytes,
                    )
                )

    def _life(self, peer: AgentPeer) -> dict[str, Any]:
        return {"ep_rank": peer.ep_rank, "incarnation": peer.hello.incarnation, "at": self._clock()}

    def _handle(self, event: e.Event) -> None:
        try:
            commands = self._membership.handle(event)
        except InvalidTransition as error:
            assert isinstance(event, e.RankEvent), "nobody else can break the protocol"
            logger.error("%s", error)
            peer = self._peers.agents.get(event.ep_rank)
            if peer is not None:
                # It goes on in a way that nobody else does, so it must end before the others go on.
                self._lookout.fence(peer, str(error), self._clock())
            return
        self.status = replace(
            self._membership.status(), nodes=self._peers.nodes(), last_counters=dict(self._last_counters)
        )
        self._on_status(self.status)
        if self._membership.is_ready:
            self.is_settled.set()
        for command in commands:
            self._execute(command)

    # Commands out.

    def _execute(self, command: c.Command) -> None:
        match command:
            case c.StartDrain():
                self.order(command.ep_rank, m.StartDrainMsg())
            case c.StopDrain():
                self.order(command.ep_rank, m.StopDrainMsg())
            case c.Prepare():
                self._send_plan(command)
            case c.Cancel():
                for ep_rank in command.targets:
                    self.order(ep_rank, m.CancelMsg(membership_epoch=command.membership_epoch))
            case c.BreakGroup():
                for ep_rank in command.ep_ranks:
                    self.order(ep_rank, m.BreakMsg(generation=command.generation, lost=command.lost))
            case c.Recover():
                self._send_recovery(command)
            case c.AbandonRank():
                self._on_abandon(command.ep_rank)
            case c.FenceRank():
                self._lookout.fence(self._peers.agents[command.ep_rank], command.reason, self._clock())
            case c.SetRouting():
                self._on_routing(command.ep_ranks, command.members)
            case c.FinishOperation():
                self._finish_operation(command)
            case c.GrantFence():
                self._grant_fence(command.fence_id)
            case c.RefuseFence():
                future = self._fences.pop(command.fence_id, None)
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_exception(FenceRefused(command.reason))
            case c.Fail():
                self.end(command.reason)
            case _:
                raise TypeError(f"unknown command {command!r}")

    def _send_plan(self, plan: c.Prepare) -> None:
        message = m.PrepareMsg(
            membership_epoch=plan.membership_epoch,
            old_members=plan.old_members,
            members=plan.members,
            leavers_exit=plan.leavers_exit,
            old_placement=plan.old_placement,
            new_placement=plan.new_placement,
            mailboxes={rank: self._peers.agents[rank].hello.mailbox for rank in plan.targets},
        )
        for ep_rank in plan.targets:
            self.order(ep_rank, message)

    def _send_recovery(self, command: c.Recover) -> None:
        message = m.RecoverMsg(
            generation=command.generation,
            membership_epoch=command.membership_epoch,
            members=command.members,
            placement=command.placement,
            live=command.ep_ranks,
            weight_version=command.weight_version,
            mailboxes={rank: self._peers.agents[rank].hello.mailbox for rank in command.ep_ranks},
        )
        for ep_rank in command.ep_ranks:
            self.order(ep_rank, message)

    def _finish_operation(self, command: c.FinishOperation) -> None:
        result = OperationResult(
            operation_id=command.operation_id,
            ok=command.ok,
            reason=command.reason,
            membership_epoch=command.membership_epoch,
        )
        self._on_result(result)
        for waiter in self._waiters.pop(command.operation_id, ()):
            if isinstance(waiter, bytes):
                self._send(
                    waiter,
                    m.OperationMsg(
                        command.operation_id, command.ok, command.reason, command.membership_epoch
                    ),
                )
            elif waiter.set_running_or_notify_cancel():
                waiter.set_result(result)

    def _grant_fence(self, fence_id: str) -> None:
        future = self._fences.pop(fence_id, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(fence_id)
        else:
            # Nobody waits for it any more, so nobody would release it.
            self.release_fence(fence_id)

    def order(self, ep_rank: int, order: m.WireOrderMsg) -> None:
        """What cannot be delivered goes out again with a later heartbeat; without one the rank is lost."""
        session = self._peers.agents[ep_rank].session
        number = session.send(order, self._clock())
        self._send(self._peers.agents[ep_rank].identity, m.NumberedOrderMsg(number, session.heard, order))

    def _send(self, identity: bytes, message: m.ManagerOutMsg) -> bool:
        try:
            self._socket.send_multipart([identity, m.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            logger.warning("%s not delivered: %s", type(message).__name__, error)
            return False
        return True
