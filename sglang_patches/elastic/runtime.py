"""One rank's part in membership changes: votes, switches, parks, rejoins. Runs in the scheduler's own thread.

    loop top: switch if agreed > take orders > report drained | cancel      (SGLang then receives requests)
    gather:   one more column per rank, its vote: the epoch that it is ready for, or the one in force
    all votes equal and new: every member has read the same tensor, so all switch at their next loop top

What it decides is in `flexfloor.membership.member`; here it moves weights and runs SGLang.
Whoever is outside the group waits in `_park` and takes part in no collective.

After a loss (see `Recovery`) every rank goes on with the gather, wherever the group broke:

    at the loop top | in the broadcast     no broadcast in this iteration, then the gather
    in the gather                          the gather again
    in the forward pass                    a gather with the same batch, then the forward pass again
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import zmq

from flexfloor.experts.placement import ExpertPlacement
from flexfloor.membership.agent import AgentLink
from flexfloor.membership.member import Member
from flexfloor.membership.messages import PrepareMsg, SwitchedMsg
from sglang_patches import iteration_log
from sglang_patches.counters import IterationCounters
from sglang_patches.elastic.controls import ControlLog
from sglang_patches.elastic.delays import Delays
from sglang_patches.elastic.drained import finish_idle_passes, is_drained
from sglang_patches.elastic.expert_slots import ExpertLayers
from sglang_patches.elastic.failures import is_group_failure
from sglang_patches.elastic.fault_points import FaultPoints
from sglang_patches.elastic.graphs import GraphSets
from sglang_patches.elastic.groups import restamp
from sglang_patches.elastic.parking import ParkedMemory
from sglang_patches.elastic.prefill_again import PrefillAgain
from sglang_patches.elastic.prepare import Plan, Preparer
from sglang_patches.elastic.recovery import Recovery

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
        controls: ControlLog | None = None,
        recovery: Recovery | None = None,
        faults: FaultPoints | None = None,
        prefill_again: PrefillAgain | None = None,
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
        self._controls = controls or ControlLog()
        self._recovery = recovery
        self._faults = faults or FaultPoints("", ep_rank)
        self._prefill_again = prefill_again
        """None: a broken pass is made again and its result is taken."""
        self._is_parked = False
        self._skips_broadcast = False
        self._unsent: list[Any] = []
        """Control requests that came to this rank, the first, while it made no broadcast."""
        self._must_park = False
        """A recovery has left this rank out; it parks at the next loop top."""
        self._member: Member[Plan] = Member(ep_rank, link.send, self._start_plan)

    @property
    def membership_epoch(self) -> int:
        """The epoch under which this rank runs its iterations now."""
        return self._member.epoch

    def at_loop_top(self) -> None:
        """Before SGLang receives requests: the one place where this rank changes anything."""
        self._link.beat()
        self._delays.at("loop")
        if self._prefill_again is not None:
            self._prefill_again.settle()
        if plan := self._member.due_switch:
            self._switch(plan)
        if self._must_park:
            self._leave()
        for order in self._link.orders():
            self._member.take(order)
        if self._member.must_recover:
            self._recover("the loop top")
        self._member.settle(self._is_drained)

    def vote(self, num_tokens: int) -> int:
        """This rank's column in the gather that opens the iteration."""
        return self._member.vote(num_tokens, self._is_drained)

    def read_votes(self, votes: Sequence[int]) -> None:
        """All columns of the gather, the same on every member."""
        self._member.read_votes(votes)

    # What SGLang does with the whole group: see the table above.

    def broadcast(
        self,
        call: Callable[[list[Any]], list[Any]],
        split: Callable[[list[Any]], tuple[list[Any], list[Any]]],
        own: Sequence[Any],
    ) -> list[Any]:
        """The exchange of requests at the loop top; `own` came to this rank. Returns what it has to process.

        `split`: into work, which stays on its rank, and control requests, which the first rank broadcasts.
        """
        requests = [*self._unsent, *own]
        self._unsent = []
        if self._skips_broadcast or self._must_park:
            self._skips_broadcast = False
            work, self._unsent = split(requests)
            return work
        try:
            self._faults.at("broadcast")
            work, control = split(call(requests))
        except Exception as error:
            work, control = split(requests)
            self._recover("the broadcast of control requests", error, lambda: self._hold(control))
            self._skips_broadcast = False
            return work
        return [*work, *self._controls.take(control)]

    def gather(self, call: Callable[[], Any]) -> Any:
        """The exchange of batch sizes; returns SGLang's batch, or None for a rank that is to park."""
        while not self._must_park:
            try:
                self._faults.at("gather")
                return call()
            except Exception as error:
                self._recover("the exchange of batch sizes", error)
                # The broadcast of this iteration is behind this rank.
                self._skips_broadcast = False
        return None

    def forward(self, call: Callable[[], Any], batch: Any, idle_result: Callable[[], Any]) -> Any:
        """The forward pass of this batch. Made again, it writes the same KV to the same slots."""
        was_broken = False
        while True:
            try:
                self._faults.at(_phase_of(batch))
                result = call()
                if was_broken and self._prefill_again is not None and not batch.forward_mode.is_idle():
                    self._prefill_again.discard(result)
                return result
            except Exception as error:
                self._recover("the forward pass", error)
                self._skips_broadcast = False
                was_broken = True
            gathered = self._scheduler.dp_attn_adapter.prepare_mlp_sync_batch(batch)
            if gathered is None or max(batch.global_num_tokens) == 0:
                # Only the lost ranks had tokens, so the others make no pass.
                return idle_result()

    def is_discarded(self, result: Any) -> bool:
        """Whether SGLang must take no token from this pass."""
        return self._prefill_again is not None and self._prefill_again.is_discarded(result)

    def update_weights(self, call: Callable[[], Any], *, begins: bool, ends: bool) -> Any:
        """One of SGLang's calls that change weights. A loss inside cannot be made good."""
        if self._recovery is None:
            return call()
        if begins:
            self._recovery.weights_change()
        try:
            self._faults.at("update")
            reply = call()
        except Exception as error:
            self._recover("a weight update", error)
            raise
        if ends and reply.success:
            self._recovery.weights_changed(weight_version())
        return reply

    def rename_weights(self) -> None:
        """The same weights have another version now."""
        if self._recovery is not None:
            self._recovery.weights_renamed(weight_version())

    def _recover(
        self, where: str, error: Exception | None = None, before: Callable[[], None] = lambda: None
    ) -> None:
        """Come back in the next group. Raises the error where it is none of a group, or nobody recovers."""
        if error is not None and (self._recovery is None or not is_group_failure(error)):
            raise error
        assert self._recovery is not None, "a break was ordered, and recovery is off"
        before()
        order = self._recovery.run(self._member, where, is_parked=self._is_parked)
        self._placement = order.placement
        is_member = self.ep_rank in order.members
        if is_member:
            self._is_parked = False
            self._graphs.install(order.members)
        elif not self._is_parked:
            self._must_park = True
        self._skips_broadcast = is_member

    def _hold(self, control: list[Any]) -> None:
        if self._scheduler.tp_group.rank_in_group == 0:
            self._controls.hold(control)

    def _leave(self) -> None:
        """Park without a switch."""
        self._must_park = False
        finish_idle_passes(self._scheduler)
        iteration_log.flush()
        self._memory.release()
        self._park()

    def _is_drained(self) -> bool:
        return is_drained(self._scheduler)

    def _start_plan(self, order: PrepareMsg) -> Plan:
        plan = plan_of(order)
        self._preparer.submit(plan)
        return plan

    def _switch(self, plan: Plan) -> None:
        started_s = time.perf_counter()
        self._delays.at("switch")
        self._faults.at("switch")
        stays = self._member.switch(plan)
        self._placement = plan.new_placement
        self._controls.switch(plan.membership_epoch)
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
                self._exit()
            self._park()

    def _exit(self) -> NoReturn:
        self._link.close()
        # Code 0: SGLang's watchers take it for a normal end and go on serving.
        raise SystemExit(0)

    def _park(self) -> None:
        """Wait outside the group, without the CPU, until a change or a recovery brings this rank back in."""
        self._is_parked = True
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
            if self._member.stands_down:
                self._exit()
            if self._member.must_recover:
                self._recover("its parking place")
                if not self._is_parked:
                    return
                # A plan that came to nothing may have begun to take the memory again.
                self._memory.release()
            if self._preparer.done_fd in ready:
                os.eventfd_read(self._preparer.done_fd)
                if self._member.plan is not None and self._member.plan.dropped.is_set():
                    self._memory.release()
            self._member.settle_withdrawn()
            if plan := self._member.due_return:
                self._is_parked = False
                self._switch(plan)
                return


def _phase_of(batch: Any) -> str:
    if batch.forward_mode.is_idle():
        return "idle"
    return "prefill" if batch.forward_mode.is_extend() else "decode"


def weight_version() -> str:
    """What SGLang calls the weights of this rank."""
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().weight_version)


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
