"""How few ranks can serve a model: experts, dense weights and KV cache against the memory of a rank. PURE.

With m ranks in the group, a rank fits where

    ceil(E / m) x layers x expert bytes + dense bytes + KV tokens needed x bytes per token <= usable - other

The floor is the least m that fits. Where expert slots have fixed addresses, those of the floor are reserved
from the start: `slot_floor` says what that takes from the KV cache of the full group.
"""

from dataclasses import dataclass

from flexfloor.model_memory import ModelShape as ModelShape
from flexfloor.model_memory import ModelSizes, format_bytes, max_experts_per_rank, rank_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory of one rank."""

    memory_bytes: int
    usable_share: float
    """The rest is left to activations, collectives' buffers and the runtime itself."""
    other_bytes: int = 0
    """What else lies there, e.g. a trainer rank on the same device."""

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * self.usable_share) - self.other_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KvNeed:
    """KV tokens that must be resident at once, so that nothing is retracted."""

    longest_tokens: int
    """Of the longest sequence; it lies on one rank."""
    group_tokens: int = 0
    """Of all sequences in flight, spread evenly over the ranks that are left."""

    def tokens_per_rank(self, num_ranks: int) -> int:
        return max(self.longest_tokens, -(-self.group_tokens // num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSize:
    """A rank's memory when `num_ranks` serve."""

    num_ranks: int
    num_expert_slots: int
    """Of every layer."""
    expert_bytes: int
    dense_bytes: int
    kv_bytes: int
    """Left for the KV cache; never negative."""
    kv_tokens: int
    """How many tokens that is."""
    kv_tokens_needed: int
    reason: str | None
    """Why it does not fit, with the numbers."""

    @property
    def is_feasible(self) -> bool:
        return self.reason is None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFloor:
    """Expert slots reserved from the start, and their cost while the full group serves."""

    floor: int
    num_expert_slots: int
    """Reserved in every layer: ceil(E / floor)."""
    num_spare_slots: int
    """Of those, empty in the full group."""
    spare_bytes: int
    """Taken from the KV cache of every rank."""
    kv_tokens: int
    """Of a rank with the reservation ..."""
    kv_tokens_without: int
    """... and without it, in the full group."""


def plan_sizes(model: ModelSizes, ep_size: int, budget: MemoryBudget, need: KvNeed) -> tuple[GroupSize, ...]:
    """Every size of the group, from all ranks down to one."""
    return tuple(plan_size(model, num_ranks, budget, need) for num_ranks in range(ep_size, 0, -1))


def plan_size(model: ModelSizes, num_ranks: int, budget: MemoryBudget, need: KvNeed) -> GroupSize:
    needed = need.tokens_per_rank(num_ranks)
    num_slots = max_experts_per_rank(model.num_experts, num_ranks)
    memory = rank_memory(model, num_expert_slots=num_slots, kv_tokens=needed)
    kv_bytes = _kv_bytes(model, num_slots, budget)
    reason = None
    if memory.total_bytes > budget.usable_bytes:
        reason = (
            f"at size {num_ranks} a rank needs {format_bytes(memory.total_bytes)} "
            f"(experts {format_bytes(memory.expert_bytes)}: {num_slots} slots in every layer, "
            f"dense weights {format_bytes(memory.dense_bytes)}, "
            f"KV cache {format_bytes(memory.kv_bytes)}: {needed} tokens), "
            f"and {format_bytes(budget.usable_bytes)} are there"
        )
    return GroupSize(
        num_ranks=num_ranks,
        num_expert_slots=num_slots,
        expert_bytes=memory.expert_bytes,
        dense_bytes=memory.dense_bytes,
        kv_bytes=kv_bytes,
        kv_tokens=kv_bytes // model.kv_bytes_per_token,
        kv_tokens_needed=needed,
        reason=reason,
    )


def least_floor(model: ModelSizes, ep_size: int, budget: MemoryBudget, need: KvNeed) -> int:
    """Fewest ranks that can serve. ValueError with the numbers where not even all of them can."""
    sizes = plan_sizes(model, ep_size, budget, need)
    fitting = [size.num_ranks for size in sizes if size.is_feasible]
    if not fitting:
        raise ValueError(str(sizes[0].reason))
    return min(fitting)


def check_floor(floor: int, model: ModelSizes, ep_size: int, budget: MemoryBudget, need: KvNeed) -> None:
    """A floor may lie above the least one, never below: ValueError with the numbers."""
    if not 1 <= floor <= ep_size:
        raise ValueError(f"floor={floor}: the group has 1 to {ep_size} ranks")
    reason = plan_size(model, floor, budget, need).reason
    if reason is not None:
        raise ValueError(reason)


def slot_floor(model: ModelSizes, ep_size: int, floor: int, budget: MemoryBudget) -> SlotFloor:
    """What it costs to reserve the slots of a group of `floor` ranks from the start."""
    num_slots = max_experts_per_rank(model.num_experts, floor)
    num_used = max_experts_per_rank(model.num_experts, ep_size)
    return SlotFloor(
        floor=floor,
        num_expert_slots=num_slots,
        num_spare_slots=num_slots - num_used,
        spare_bytes=(num_slots - num_used) * model.num_layers * model.expert_bytes,
        kv_tokens=_kv_bytes(model, num_slots, budget) // model.kv_bytes_per_token,
        kv_tokens_without=_kv_bytes(model, num_used, budget) // model.kv_bytes_per_token,
    )


def _kv_bytes(model: ModelSizes, num_expert_slots: int, budget: MemoryBudget) -> int:
    """What a rank with so many slots has left for the KV cache."""
    weights = rank_memory(model, num_expert_slots=num_expert_slots, kv_tokens=0)
    return max(0, budget.usable_bytes - weights.total_bytes)
