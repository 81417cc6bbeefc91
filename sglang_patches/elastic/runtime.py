"""One rank's part in membership changes: votes, switches, parks, rejoins. Runs in the scheduler's own thread.

    loop top: switch if agreed > take orders > report drained | cancel      (SGLang then receives requests)
    gather:   one more column per rank, its vote: the epoch that it is ready for, or the one in force
    all votes equal and new: every member has read the same tensor, so all switch at their next loop top

What it decides is in `flexfloor.membership.member`; here it moves weights and runs SGLang.
Whoever is outside the group waits in `_park` and takes part in no collective.
"""

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import zmq

from flexfloor.experts.placement import ExpertPlacement
from flexfloor.membership.agent import AgentLink
from flexfloor.membership.member import Member
from flexfloor.membership.messages import PrepareMsg, SwitchedMsg
from sglang_patches import iteration_log
from sglang_patches.counters import IterationCounters
from sglang_patches.elastic.delays import Delays
from sglang_patches.elastic.drained import finish_idle_passes, is_drained
from sglang_patches.elastic.expert_slots import ExpertLayers
from sglang_patches.elastic.graphs import GraphSets
from sglang_patches.elastic.groups import restamp
from sglang_patches.elastic.parking import ParkedMemory
from sglang_patches.elastic.prepare import Plan, Preparer

logger = logging.getLogger(__name__)


class ElasticRuntime:
    """Made once per scheduler process, when SGLang's scheduler is complete."""

    def __init__(
        self,
        scheduler: Any,
        ep_rank: int,
        link: AgentLink,
        preparer: Preparer,
        experts: ExpertLayers,
        memory: ParkedMemory,
        placement: ExpertPlacement,
        delays: Delays,
        graphs: GraphSets,
    ) -> None:
        self.ep_rank = ep_rank
        self._scheduler = scheduler
        self._link = link
        self._preparer = preparer
        self._experts = experts
        self._memory = memory
        self._placement = placement
        self._delays = delays
        self._graphs = graphs
        self._member: Member[Plan] = Member(ep_rank, link.send, self._start_plan)

    @property
    def membership_epoch(self) -> int:
        """The epoch under which this rank runs its iterations now."""
        return self._member.epoch

    def at_loop_top(self) -> None:
        """Before SGLang receives requests: the one place where this rank changes anything."""
        self._link.beat()
        self._delays.at("loop")
        if plan := self._member.due_switch:
            self._switch(plan)
        for order in self._link.orders():
            self._member.take(order)
        self._member.settle(self._is_drained)

    def vote(self, num_tokens: int) -> int:
        """This rank's column in the gather that opens the iteration."""
        return self._member.vote(num_tokens, self._is_drained)

    def read_votes(self, votes: Sequence[int]) -> None:
        """All columns of the gather, the same on every member."""
        self._member.read_votes(votes)

    def _is_drained(self) -> bool:
        return is_drained(self._scheduler)

    def _start_plan(self, order: PrepareMsg) -> Plan:
        plan = plan_of(order)
        self._preparer.submit(plan)
        return plan

    def _switch(self, plan: Plan) -> None:
        started_s = time.perf_counter()
        self._delays.at("switch")
        stays = self._member.switch(plan)
        self._placement = plan.new_placement
        if stays:
            assert plan.staged is not None
            self._graphs.settle()
            restamp(self._scheduler, plan.coordinator)
            self._experts.install(plan.staged)
            self._graphs.install(plan.members)
        else:
            finish_idle_passes(self._scheduler)
            iteration_log.flush()
        stall_s = time.perf_counter() - started_s
        if not stays:
            self._memory.release()
        exits, num_bytes = self.ep_rank in plan.leavers_exit, plan.num_bytes
        counters = IterationCounters.of(self._scheduler).as_dict() if exits else {}
        self._link.send(SwitchedMsg(plan.membership_epoch, stall_s, num_bytes, counters))
        logger.info("flexfloor %s stall_ms=%.2f num_bytes=%d", plan.describe(), 1e3 * stall_s, num_bytes)
        if not stays:
            if exits:
                self._link.close()
                # Code 0: SGLang's watchers take it for a normal end and go on serving.
                raise SystemExit(0)
            self._park()

    def _park(self) -> None:
        """Wait outside the group, without the CPU, until a change brings this rank back in."""
        receiver = self._scheduler.request_receiver
        inboxes = [socket for socket in (receiver.recv_from_tokenizer, receiver.recv_from_rpc) if socket]
        poller = zmq.Poller()
        for inbox in inboxes:
            poller.register(inbox, zmq.POLLIN)
        poller.register(self._link.wake_fd, zmq.POLLIN)
        poller.register(self._preparer.done_fd, zmq.POLLIN)
        while True:
            # No timeout of its own, so that a parked rank rests: the link's thread watches the manager, and
            # wakes this one with a ManagerLostMsg when its deadline passes.
            ready = dict(poller.poll())
            self._link.beat()
            arrived = [inbox for inbox in inboxes if inbox in ready]
            if arrived:
                self._member.work_arrived()
                for inbox in inboxes:
                    poller.unregister(inbox)
                inboxes = []
            for order in self._link.orders():
                self._member.take(order)
            if self._preparer.done_fd in ready:
                os.eventfd_read(self._preparer.done_fd)
                if self._member.plan is not None and self._member.plan.dropped.is_set():
                    self._memory.release()
            self._member.settle_withdrawn()
            if plan := self._member.due_return:
                self._switch(plan)
                return


def plan_of(order: PrepareMsg) -> Plan:
    """The order as this rank works on it."""
    return Plan(
        membership_epoch=order.membership_epoch,
        old_members=tuple(order.old_members),
        members=tuple(order.members),
        leavers_exit=tuple(order.leavers_exit),
        old_placement=order.old_placement,
        new_placement=order.new_placement,
    )
