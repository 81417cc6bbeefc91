"""Everything that a membership change needs before its switch, done in the background while decoding goes on.

    PrepareMsg -> group of the new members -> experts (and dense weights) sent and received -> ready

Rule 1: jobs run in the order of their epochs, whole, on every rank that got the PrepareMsg, also when the
change was cancelled meanwhile: peers are waiting for the other end of each copy. Only a recovery ends them
where they are, on all live ranks.
Rule 2: nothing here touches what the running iterations use. The switch does that, in the model's own thread.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from flexfloor.experts.placement import ExpertPlacement, Transfer, transfers
from sglang_patches.elastic.expert_slots import ExpertLayers, StagedExperts
from sglang_patches.elastic.groups import GroupFactory, gather_objects
from sglang_patches.elastic.memory import dense_tensors
from sglang_patches.elastic.transfer import Move, TransferGroup

logger = logging.getLogger(__name__)

_LAYERS_AT_ONCE = 4
"""Layers whose copies are in flight together: enough to fill the link, few enough to bound the staging."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """One change as this rank sees it, from PrepareMsg to the switch."""

    membership_epoch: int
    old_members: tuple[int, ...]
    members: tuple[int, ...]
    leavers_exit: tuple[int, ...]
    old_placement: ExpertPlacement
    new_placement: ExpertPlacement
    ready: threading.Event = field(default_factory=threading.Event)
    """Its switch can be voted for. Where ranks return it is certain from here on."""
    dropped: threading.Event = field(default_factory=threading.Event)
    """It will never be ready."""
    is_withdrawn: bool = False
    """This rank was asked to cancel; whether that came in time, `ready` or `dropped` will say."""
    coordinator: Any = None
    staged: StagedExperts | None = None
    num_bytes: int = 0
    prepared_s: float = 0.0
    agreed: bool = False
    cancel_asked: bool = False

    @property
    def joiners(self) -> tuple[int, ...]:
        """Members that come back with this change."""
        return tuple(sorted(set(self.members) - set(self.old_members)))

    def describe(self) -> str:
        return f"membership_epoch={self.membership_epoch} members={self.old_members} -> {self.members}"


class Preparer:
    """The background thread of one rank."""

    def __init__(
        self,
        ep_rank: int,
        model: Any,
        groups: GroupFactory,
        transfer: TransferGroup,
        experts: ExpertLayers,
        *,
        resume_memory: Callable[[], None],
        moves_dense: bool,
        weight_version: Callable[[], object],
        delay: Callable[[str], None],
    ) -> None:
        self._ep_rank = ep_rank
        self._model = model
        self._groups = groups
        self._transfer = transfer
        self._device = transfer.device
        self._experts = experts
        self._resume_memory = resume_memory
        self._moves_dense = moves_dense
        self._weight_version = weight_version
        self._delay = delay
        self.done_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable once a plan has become ready or was dropped."""
        self._plans = self._start()

    def submit(self, plan: Plan) -> None:
        """Prepare this change; `plan.ready` is set when its switch can be voted for."""
        self._plans.put(plan)

    def restart(self, transfer: TransferGroup) -> None:
        """After a recovery: plans in flight come to nothing, and copies go over this group from now on.

        The thread may wait for a lost rank until its time is over, so another takes its place.
        """
        self._plans.put(None)
        self._transfer = transfer
        self._plans = self._start()

    def _start(self) -> "queue.SimpleQueue[Plan | None]":
        plans: queue.SimpleQueue[Plan | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(plans,), name="flexfloor-prepare", daemon=True).start()
        return plans

    def _run(self, plans: "queue.SimpleQueue[Plan | None]") -> None:
        if self._device.type != "cpu":
            # A thread starts on device 0; NCCL and new tensors go by the thread's device.
            torch.get_device_module(self._device).set_device(self._device)
        while (plan := plans.get()) is not None:
            try:
                started_s = time.monotonic()
                self._delay("prepare")
                with torch.no_grad():
                    is_ready = self._prepare(plan)
                plan.prepared_s = time.monotonic() - started_s
            # Outermost loop of the thread. A rank that is not ready never votes: the manager's deadline ends
            # the change and says which rank it was, and the log says why.
            except Exception:
                logger.exception("ep_rank=%d cannot prepare %s", self._ep_rank, plan.describe())
                is_ready = False
            (plan.ready if is_ready else plan.dropped).set()
            os.eventfd_write(self.done_fd, 1)

    def _prepare(self, plan: Plan) -> bool:
        is_member, transfer = self._ep_rank in plan.members, self._transfer
        transfer.settle()
        if self._ep_rank in plan.joiners:
            self._resume_memory()
        if is_member:
            plan.coordinator = self._groups.coordinator(plan.members, plan.membership_epoch)
            plan.staged = self._experts.stage(plan.new_placement.experts_on(self._ep_rank))
        plan.num_bytes = self._move_experts(plan, transfer) + self._move_dense(plan, transfer)
        # A rank that returns enters the new group at once and waits there. So all members settle together
        # whether the change takes place; after that nobody can drop it.
        return self._all_want(plan) if is_member and plan.joiners else True

    def _all_want(self, plan: Plan) -> bool:
        answers = gather_objects(plan.coordinator, (not plan.is_withdrawn, self._weight_version()))
        versions = sorted({str(version) for _, version in answers})
        if len(versions) > 1:
            logger.error("ep_rank=%d %s: weights differ: %s", self._ep_rank, plan.describe(), versions)
        return all(is_wanted for is_wanted, _ in answers) and len(versions) == 1

    def _move_experts(self, plan: Plan, transfer: TransferGroup) -> int:
        rows = [
            row
            for row in transfers(plan.old_placement, plan.new_placement)
            if self._ep_rank in (row.source, row.target)
        ]
        num_bytes = 0
        for first in range(0, self._experts.num_layers, _LAYERS_AT_ONCE):
            layers = range(first, min(first + _LAYERS_AT_ONCE, self._experts.num_layers))
            sends = [m for layer in layers for row in rows for m in self._sent(plan, layer, row)]
            receives = [m for layer in layers for row in rows for m in self._received(plan, layer, row)]
            num_bytes += transfer.exchange(sends, receives)
        return num_bytes

    def _sent(self, plan: Plan, layer: int, row: Transfer) -> Iterator[Move]:
        if row.source == self._ep_rank:
            tensors = self._experts.tensors_to_send(layer, row.source_slot)
            yield from self._moves(tensors, row.target, layer, row.expert, plan)

    def _received(self, plan: Plan, layer: int, row: Transfer) -> Iterator[Move]:
        if row.target == self._ep_rank:
            assert plan.staged is not None
            tensors = self._experts.tensors_to_fill(plan.staged, layer, row.target_slot)
            yield from self._moves(tensors, row.source, layer, row.expert, plan)

    def _moves(
        self, tensors: list[torch.Tensor], peer: int, layer: int, expert: int, plan: Plan
    ) -> Iterator[Move]:
        num_experts = plan.new_placement.num_experts
        for index, tensor in enumerate(tensors):
            yield Move(tensor, peer, (layer * len(tensors) + index) * num_experts + expert)

    def _move_dense(self, plan: Plan, transfer: TransferGroup) -> int:
        if not self._moves_dense or not plan.joiners:
            return 0
        donor = plan.old_members[0]
        tensors = list(dense_tensors(self._model))
        if self._ep_rank == donor:
            moves = [Move(t, peer, tag) for peer in plan.joiners for tag, t in enumerate(tensors)]
            return transfer.exchange(moves, [])
        if self._ep_rank in plan.joiners:
            return transfer.exchange([], [Move(t, donor, tag) for tag, t in enumerate(tensors)])
        return 0
