"""Stand-ins for what elastic membership touches of SGLang, and for the runtime's neighbours."""

import os
import sys
from collections import deque
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flexfloor.experts.placement import canonical, rehome
from flexfloor.membership.messages import OrderMsg, PrepareMsg, ReportMsg
from sglang_patches.elastic.expert_slots import StagedExperts
from sglang_patches.elastic.prepare import Plan

NUM_EXPERTS = 8


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    """A module of SGLang under its own name, so that the real one is not imported."""
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


class FusedMoE(torch.nn.Module):
    """A MoE layer: two weights, and a bias that is an expert tensor too, filled with the expert's mark."""

    def __init__(self, experts: Sequence[int], num_slots: int, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        marks = torch.zeros(num_slots)
        marks[: len(experts)] = torch.tensor([float(offset + expert + 1) for expert in experts])
        self.w13_weight = torch.nn.Parameter(marks.view(-1, 1, 1).repeat(1, 4, 3), requires_grad=False)
        self.w2_weight = torch.nn.Parameter(-marks.view(-1, 1, 1).repeat(1, 3, 2), requires_grad=False)
        self.w2_bias = marks.view(-1, 1).repeat(1, 3)
        self.not_per_expert = torch.zeros(1)
        self.dispatcher = SimpleNamespace(local_expert_mapping=None)
        self.num_local_experts = len(experts)
        self.moe_runner_config = SimpleNamespace(num_local_experts=len(experts))

    def named_per_expert_tensors(self, num_local_experts: int) -> list[tuple[str, torch.Tensor]]:
        return [("w2_bias", self.w2_bias)] if self.w2_bias.shape[0] == num_local_experts else []

    def replace_expert_tensor(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._parameters:
            self._parameters[name].data = tensor  # type: ignore[union-attr]
        else:
            setattr(self, name, tensor)

    def held(self) -> list[int | None]:
        """The logical expert whose tensors lie in each slot, by their marks; None where they are zero."""
        return [self._expert_in(slot) for slot in range(self.w13_weight.shape[0])]

    def _expert_in(self, slot: int) -> int | None:
        parts = (self.w13_weight[slot], -self.w2_weight[slot], self.w2_bias[slot])
        marks = {float(value) for part in parts for value in part.flatten()}
        assert len(marks) == 1, f"slot {slot} holds parts of several experts: {marks}"
        (mark,) = marks
        return int(mark) - self.offset - 1 if mark else None


class Model(torch.nn.Module):
    """Two MoE layers between dense ones. The experts of layer i are marked 100 * i + expert + 1.

    `num_slots`: with reserved slots, of which those without an expert are zero.
    """

    def __init__(self, experts: Sequence[int], num_slots: int = 0) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(3, 5, bias=False)
        self.first = FusedMoE(experts, num_slots or len(experts))
        self.second = FusedMoE(experts, num_slots or len(experts), offset=100)
        self.norm = torch.nn.LayerNorm(3)

    @property
    def layers(self) -> tuple[FusedMoE, FusedMoE]:
        return (self.first, self.second)

    def held(self) -> list[int | None]:
        """The experts in each slot, the same in both layers."""
        assert self.first.held() == self.second.held()
        return self.first.held()


class Batch:
    def __init__(self, num_requests: int = 0, *, is_idle: bool = False) -> None:
        self.num_requests = num_requests
        self.forward_mode = SimpleNamespace(is_idle=lambda: is_idle)

    def is_empty(self) -> bool:
        return self.num_requests == 0


class Scheduler:
    """Without a request at first."""

    def __init__(self, journal: list[str] | None = None) -> None:
        self.journal = [] if journal is None else journal
        self.running_batch = Batch()
        self.chunked_req: object = None
        self.waiting_queue: list[object] = []
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self._deferred_input_requests: list[object] = []
        self.last_batch: Batch | None = None
        self.result_queue: deque[tuple[Batch, str]] = deque()
        self.cur_batch_for_debug: object = "batch"
        self.request_receiver = SimpleNamespace(recv_from_tokenizer=eventfd(), recv_from_rpc=None)
        self.weight_updater = SimpleNamespace(tp_group="old")
        self.tp_group: object = "old"
        self.tp_cpu_group: object = "old"
        self.tp_size = 4

    def process_batch_result(self, batch: Batch, result: str) -> None:
        assert batch.forward_mode.is_idle()
        self.journal.append(f"take in {result}")


class Link:
    """Gives out one batch of orders per call and keeps what is sent."""

    def __init__(self, journal: list[str]) -> None:
        self.journal = journal
        self.batches: deque[list[OrderMsg]] = deque()
        self.sent: list[ReportMsg] = []
        self.num_beats = 0
        self.is_closed = False
        self.num_empty = 0
        self.wake_fd = eventfd(1)
        """Always readable: who waits for orders asks at once, and is stopped when there are no more."""

    def orders(self) -> list[OrderMsg]:
        if self.batches:
            return self.batches.popleft()
        self.num_empty += 1
        assert self.num_empty < 1000, "it waits for orders that do not come"
        return []

    def send(self, message: ReportMsg) -> None:
        assert not self.is_closed
        self.sent.append(message)
        self.journal.append(type(message).__name__)

    def beat(self) -> None:
        self.num_beats += 1

    def close(self) -> None:
        self.is_closed = True
        self.journal.append("close")


class Preparer:
    """Plans become ready when the test says so, or at once."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.is_quick = False
        self.done_fd = eventfd()

    def submit(self, plan: Plan) -> None:
        self.plans.append(plan)
        if self.is_quick:
            self.finish()

    def finish(self) -> None:
        plan = self.plans[-1]
        plan.coordinator = SimpleNamespace(
            world_size=len(plan.members), rank_in_group=0, cpu_group=f"cpu {plan.members}"
        )
        plan.staged, plan.num_bytes = StagedExperts(()), 64
        plan.ready.set()
        os.eventfd_write(self.done_fd, 1)


class Experts:
    def __init__(self, journal: list[str]) -> None:
        self.journal = journal

    def install(self, staged: StagedExperts) -> None:
        self.journal.append("install")


class Graphs:
    """On a CPU, where no set has any."""

    def settle(self) -> None: ...

    def install(self, members: tuple[int, ...]) -> None: ...


class Memory:
    def __init__(self, journal: list[str]) -> None:
        self.journal = journal

    def release(self) -> int:
        self.journal.append("release")
        return 1


class Parallel:
    """`get_parallel()` of SGLang."""

    def __init__(self, journal: list[str]) -> None:
        self.journal = journal
        self.values: dict[str, object] = {"tp_size": 4}

    def override_permanently(self, **values: object) -> None:
        self.values.update(values)
        self.journal.append("restamp")


def eventfd(value: int = 0) -> int:
    return os.eventfd(value, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def prepare_msg(
    epoch: int, old_members: Sequence[int], members: Sequence[int], *, leavers_exit: Sequence[int] = ()
) -> PrepareMsg:
    """The order for a change of four ranks, reached by whatever came before it."""
    old_placement = rehome(canonical(NUM_EXPERTS, 4), old_members)
    return PrepareMsg(
        membership_epoch=epoch,
        old_members=tuple(old_members),
        members=tuple(members),
        leavers_exit=tuple(leavers_exit),
        old_placement=old_placement,
        new_placement=rehome(old_placement, members),
        mailboxes={},
    )
