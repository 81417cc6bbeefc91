"""How one rank goes on after a loss: leaves the broken group, restores experts, enters the next group.

    something failed, or was broken by order
      -> break all groups here, which wakes the peers too
      -> report what this rank holds, wait for RecoverMsg          (again at every further loss)
      -> new store client, group of the members, experts from the host mirrors, a common barrier
      -> the same call once more, beginning with the gather

Runs in the model's thread. Groups are made in threads that can be given up: a rendezvous with a rank that
dies meanwhile ends only when its time is over.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flexfloor.experts.placement import to_restore
from flexfloor.membership.agent import AgentLink
from flexfloor.membership.member import Member
from flexfloor.membership.messages import BrokenMsg, RecoveredMsg, RecoverMsg, RecoveryFailedMsg
from sglang_patches.elastic.controls import ControlLog
from sglang_patches.elastic.expert_slots import ExpertLayers
from sglang_patches.elastic.failures import is_group_failure
from sglang_patches.elastic.fault_points import FaultPoints
from sglang_patches.elastic.groups import GroupBroken, GroupFactory, gather_objects, restamp
from sglang_patches.elastic.mirror import ExpertMirrors, MirrorUnusable
from sglang_patches.elastic.parking import ParkedMemory
from sglang_patches.elastic.prepare import Plan, Preparer
from sglang_patches.elastic.transfer import TransferGroup

logger = logging.getLogger(__name__)

WAIT_TIMEOUT_S = 600.0
"""For the manager's order; it has deadlines of its own for everything that it waits for."""
_POLL_S = 0.01

T = TypeVar("T")


class Recovery:
    """Example:
    order = recovery.run(member, "the forward pass", is_parked=False)   # returns in the new group
    """

    def __init__(
        self,
        scheduler: Any,
        ep_rank: int,
        link: AgentLink,
        groups: GroupFactory,
        preparer: Preparer,
        experts: ExpertLayers,
        memory: ParkedMemory,
        mirrors: ExpertMirrors,
        controls: ControlLog,
        faults: FaultPoints,
        *,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._ep_rank = ep_rank
        self._link = link
        self._groups = groups
        self._preparer = preparer
        self._experts = experts
        self._memory = memory
        self._mirrors = mirrors
        self._controls = controls
        self._faults = faults
        self._device = device
        self._timeout_s = timeout_s
        self.weight_version: str | None = None
        """Of the weights that lie here whole; None during an update."""

    def weights_change(self) -> None:
        """An update begins: from here on no loss can be made good."""
        self.weight_version = None
        self._mirrors.invalidate()

    def weights_changed(self, weight_version: str) -> None:
        """It is over, on this rank: copy the experts."""
        started_s = time.perf_counter()
        self._mirrors.write(weight_version)
        self.weight_version = weight_version
        took_s = time.perf_counter() - started_s
        logger.info(
            "flexfloor mirror weight_version=%s num_bytes=%d took_s=%.3f",
            weight_version,
            self._mirrors.num_bytes,
            took_s,
        )

    def weights_renamed(self, weight_version: str) -> None:
        """The same weights under another version."""
        if self.weight_version is not None:
            self._mirrors.rename(weight_version)
            self.weight_version = weight_version

    def run(self, member: Member[Plan], where: str, *, is_parked: bool) -> RecoverMsg:
        """Leave the broken group and come back in the next one, or stay outside. Returns the order."""
        started_s = time.perf_counter()
        logger.warning(
            "flexfloor ep_rank=%d membership_epoch=%d broken in %s", self._ep_rank, member.epoch, where
        )
        member.drop_plan()

        def report(generation: int) -> BrokenMsg:
            slots, version = self._experts.slots, self.weight_version
            return member.broken(generation, slots=slots, weight_version=version, where=where)

        while True:
            self._groups.break_all()
            order = self._link.wait_recover(report, WAIT_TIMEOUT_S)
            try:
                with torch.no_grad():
                    num_bytes = self._enter(order, is_parked)
            except MirrorUnusable as error:
                logger.error("flexfloor ep_rank=%d cannot recover: %s", self._ep_rank, error)
                self._link.send(RecoveryFailedMsg(generation=order.generation, reason=str(error)))
            except Exception as error:
                if not is_group_failure(error):
                    raise
                logger.warning(
                    "flexfloor ep_rank=%d generation=%d: %s", self._ep_rank, order.generation, error
                )
            else:
                break
        member.recover(order)
        stall_s = time.perf_counter() - started_s
        self._link.send(
            RecoveredMsg(
                generation=order.generation,
                membership_epoch=order.membership_epoch,
                stall_s=stall_s,
                num_bytes=num_bytes,
            )
        )
        logger.warning(
            "flexfloor ep_rank=%d recovered generation=%d membership_epoch=%d members=%s stall_ms=%.1f "
            "num_bytes=%d",
            self._ep_rank,
            order.generation,
            order.membership_epoch,
            order.members,
            1e3 * stall_s,
            num_bytes,
        )
        return order

    def _enter(self, order: RecoverMsg, is_parked: bool) -> int:
        self._faults.at("recovery")
        self._groups.renew_store()
        is_member = self._ep_rank in order.members
        transfer = self._made(
            order, lambda: TransferGroup(self._groups, order.live, self._device, order.generation)
        )
        self._preparer.restart(transfer)
        if not is_member:
            return 0
        if is_parked:
            if self._memory.loses_dense:
                raise MirrorUnusable(
                    f"ep_rank {self._ep_rank} was parked without its dense weights and is needed now. "
                    "Fix: leave dense out of --flexfloor-park-frees, or lower the floor"
                )
            self._memory.resume()
        members = order.members
        coordinator = self._made(
            order, lambda: self._groups.coordinator(members, order.membership_epoch, order.generation)
        )
        num_bytes = self._restore(order)
        self._faults.at("restored")
        # Also a barrier: nobody decodes before all have their experts.
        reports = gather_objects(coordinator, self._controls.report(was_member=not is_parked))
        self._check(order)
        restamp(self._scheduler, coordinator)
        self._controls.settle(reports, order.membership_epoch, was_member=not is_parked)
        return num_bytes

    def _restore(self, order: RecoverMsg) -> int:
        wanted = order.placement.experts_on(self._ep_rank)
        version = str(order.weight_version)
        if self.weight_version != version:
            raise MirrorUnusable(
                f"ep_rank {self._ep_rank} holds weight_version {self.weight_version}, and {version} is "
                "served: a rank was lost during a weight update"
            )
        rows = to_restore(self._experts.slots, wanted)
        staged = self._experts.stage(wanted)
        num_bytes = self._mirrors.restore(
            rows, version, lambda layer, slot: self._experts.tensors_to_fill(staged, layer, slot)
        )
        self._experts.install(staged)
        return num_bytes

    def _made(self, order: RecoverMsg, make: Callable[[], T]) -> T:
        """What `make` gives, unless a further loss makes it worthless. Raises GroupBroken then."""
        answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((make(), None))
            # Handed over to the thread that waits.
            except Exception as error:
                answers.put((None, error))

        threading.Thread(target=run, name="flexfloor-group", daemon=True).start()
        end_s = time.monotonic() + self._timeout_s
        while True:
            try:
                made, error = answers.get(timeout=_POLL_S)
            except queue.Empty:
                self._link.beat()
                self._check(order)
                if time.monotonic() >= end_s:
                    raise GroupBroken(f"no group of {order.live} within {self._timeout_s:g} s") from None
                continue
            if error is not None:
                raise error
            self._check(order)
            return made  # type: ignore[return-value]

    def _check(self, order: RecoverMsg) -> None:
        if self._link.generation != order.generation:
            raise GroupBroken(f"generation {order.generation} is over: {self._link.generation} was ordered")
