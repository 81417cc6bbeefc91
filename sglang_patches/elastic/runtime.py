"""One rank's part in membership changes: votes, switches, parks, rejoins. Runs in the scheduler's own thread.

    loop top: switch if agreed > take orders > report drained | cancel      (SGLang then receives requests)
    gather:   one more column per rank, its vote: the epoch that it is ready for, or the one in force
    all votes equal and new: every member has read the same tensor, so all switch at their next loop top

Rule 1: a rank acts only at its loop top, between two iterations. So what it votes and what it reads in one
gather cannot be undone in between.
Rule 2: a leaver votes for leaving only in a gather in which it has no tokens and no request.
Rule 3: whoever is outside the group waits in `_park` and takes part in no collective.

After a loss (see `Recovery`) every rank goes on with the gather, wherever the group broke:

    at the loop top | in the broadcast     no broadcast in this iteration, then the gather
    in the gather                          the gather again
    in the forward pass                    a gather with the same batch, then the forward pass again
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from flexfloor.experts.placement import ExpertPlacement
from flexfloor.membership.agent import AgentLink
from flexfloor.membership.messages import (
    BreakMsg,
    CancelAnsweredMsg,
    CancelAskedMsg,
    CancelMsg,
    DrainFinishedMsg,
    ManagerLostMsg,
    PrepareMsg,
    StartDrainMsg,
    StopDrainMsg,
    SwitchedMsg,
    WorkArrivedMsg,
)
from sglang_patches import iteration_log
from sglang_patches.counters import IterationCounters
from sglang_patches.elastic.controls import ControlLog
from sglang_patches.elastic.delays import Delays
from sglang_patches.elastic.drained import finish_idle_passes, is_drained
from sglang_patches.elastic.expert_slots import ExpertLayers
from sglang_patches.elastic.failures import is_group_failure
from sglang_patches.elastic.graphs import GraphSets
from sglang_patches.elastic.groups import restamp
from sglang_patches.elastic.parking import ParkedMemory
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
        self._generation = 0
        """Of the last recovery that this rank has been through."""
        self._is_parked = False
        self._skips_broadcast = False
        self._unsent: list[Any] = []
        """Control requests that came to this rank, the first, while it made no broadcast."""
        self._must_park = False
        """A recovery has left this rank out; it parks at the next loop top."""
        self._epoch = 0
        self._plan: Plan | None = None
        self._is_draining = False
        self._has_reported_drained = False

    @property
    def membership_epoch(self) -> int:
        """The epoch under which this rank runs its iterations now."""
        return self._epoch

    def at_loop_top(self) -> None:
        """Before SGLang receives requests: the one place where this rank changes anything."""
        self._link.beat()
        self._delays.at("loop")
        if self._plan is not None and self._plan.agreed:
            self._switch(self._plan)
        if self._must_park:
            self._leave()
        self._take_orders("at the loop top")
        self._settle_withdrawn()
        if self._is_draining:
            self._report_drained()
        self._cancel_when_busy()

    def vote(self, num_tokens: int) -> int:
        """This rank's column in the gather that opens the iteration."""
        plan = self._plan
        if plan is None or not plan.ready.is_set():
            return self._epoch
        if self.ep_rank not in plan.members and (num_tokens > 0 or not is_drained(self._scheduler)):
            return self._epoch
        return plan.membership_epoch

    def read_votes(self, votes: Sequence[int]) -> None:
        """All columns of the gather, the same on every member."""
        plan = self._plan
        if plan is not None and all(vote == plan.membership_epoch for vote in votes):
            plan.agreed = True

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
                return call()
            except Exception as error:
                self._recover("the exchange of batch sizes", error)
                # The broadcast of this iteration is behind this rank.
                self._skips_broadcast = False
        return None

    def forward(self, call: Callable[[], Any], batch: Any, idle_result: Callable[[], Any]) -> Any:
        """The forward pass of this batch. A pass that was broken writes the same KV again to the same slots."""
        while True:
            try:
                return call()
            except Exception as error:
                self._recover("the forward pass", error)
                self._skips_broadcast = False
            gathered = self._scheduler.dp_attn_adapter.prepare_mlp_sync_batch(batch)
            if gathered is None or max(batch.global_num_tokens) == 0:
                # Only the lost ranks had tokens, so the others make no pass.
                return idle_result()

    def update_weights(self, call: Callable[[], Any], *, begins: bool, ends: bool) -> Any:
        """One of SGLang's calls that change weights. A loss inside cannot be made good."""
        if self._recovery is None:
            return call()
        if begins:
            self._recovery.weights_change()
        try:
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
        if self._recovery is None or (error is not None and not is_group_failure(error)):
            assert error is not None
            raise error
        before()
        self._plan, self._is_draining, self._has_reported_drained = None, False, False
        order = self._recovery.run(where, self._epoch, self._is_parked)
        self._generation, self._epoch = order.generation, order.membership_epoch
        self._placement = order.placement
        if self.ep_rank in order.members:
            self._is_parked = False
            self._graphs.install(order.members)
        elif not self._is_parked:
            self._must_park = True
        self._skips_broadcast = self.ep_rank in order.members

    def _hold(self, control: list[Any]) -> None:
        if self._scheduler.tp_group.rank_in_group == 0:
            self._controls.hold(control)

    def _take_orders(self, where: str) -> None:
        for order in self._link.orders():
            if isinstance(order, BreakMsg):
                if order.generation > self._generation and self._recovery is not None:
                    # What was ordered with it is void.
                    self._recover(where)
                    return
            else:
                self._take(order)

    def _leave(self) -> None:
        """Park without a switch."""
        self._must_park = False
        finish_idle_passes(self._scheduler)
        iteration_log.flush()
        self._memory.release()
        self._park()

    def _take(self, order: object) -> None:
        match order:
            case StartDrainMsg():
                self._is_draining, self._has_reported_drained = True, False
            case StopDrainMsg():
                self._is_draining = False
            case PrepareMsg():
                self._plan = plan_of(order)
                self._preparer.submit(self._plan)
            case CancelMsg():
                self._cancel(order.membership_epoch)
            case ManagerLostMsg():
                raise RuntimeError(f"ep_rank={self.ep_rank}: the membership manager is gone")

    def _report_drained(self) -> None:
        drained = is_drained(self._scheduler)
        if drained and not self._has_reported_drained:
            self._link.send(DrainFinishedMsg())
        # Late work makes a rank busy again; it then reports anew.
        self._has_reported_drained = drained

    def _cancel_when_busy(self) -> None:
        plan = self._plan
        if plan is None or self.ep_rank in plan.members or plan.cancel_asked or is_drained(self._scheduler):
            return
        plan.cancel_asked = True
        self._has_reported_drained = False
        self._link.send(CancelAskedMsg(membership_epoch=plan.membership_epoch))

    def _cancel(self, epoch: int) -> None:
        plan = self._plan
        if plan is None or plan.membership_epoch != epoch:
            self._answer_cancel(epoch, is_dropped=epoch > self._epoch)
        elif plan.agreed or not plan.joiners:
            self._answer_cancel(epoch, is_dropped=not plan.agreed)
        else:
            # Where ranks return, all members settle together in the background; see `Preparer`.
            plan.is_withdrawn = True

    def _settle_withdrawn(self) -> None:
        """Answer a cancel once it is known what came of it."""
        plan = self._plan
        if plan is None or not plan.is_withdrawn:
            return
        if plan.ready.is_set():
            plan.is_withdrawn = False
            self._answer_cancel(plan.membership_epoch, is_dropped=False)
        elif plan.dropped.is_set():
            self._answer_cancel(plan.membership_epoch, is_dropped=True)

    def _answer_cancel(self, epoch: int, *, is_dropped: bool) -> None:
        if is_dropped:
            self._plan = None
        self._link.send(CancelAnsweredMsg(membership_epoch=epoch, dropped=is_dropped))

    def _switch(self, plan: Plan) -> None:
        started_s = time.perf_counter()
        self._delays.at("switch")
        self._plan = None
        self._epoch = plan.membership_epoch
        self._placement = plan.new_placement
        self._controls.switch(self._epoch)
        stays = self.ep_rank in plan.members
        if stays:
            assert plan.staged is not None
            self._graphs.settle()
            restamp(self._scheduler, plan.coordinator)
            self._experts.install(plan.staged)
            self._graphs.install(plan.members)
        else:
            self._is_draining = False
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
                self._link.send(WorkArrivedMsg())
                for inbox in inboxes:
                    poller.unregister(inbox)
                inboxes = []
            generation = self._generation
            self._take_orders("its parking place")
            if not self._is_parked:
                return
            if generation != self._generation:
                # A plan may have begun to take the memory again.
                self._memory.release()
            if self._preparer.done_fd in ready:
                os.eventfd_read(self._preparer.done_fd)
                if self._plan is not None and self._plan.dropped.is_set():
                    self._memory.release()
            self._settle_withdrawn()
            plan = self._plan
            if plan is not None and self.ep_rank in plan.members and plan.ready.is_set():
                self._is_parked = False
                self._switch(plan)
                return


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
