"""The experts of one rank: which logical expert sits in which expert slot, in every MoE layer.

Two ways to find room for experts taken over:
- exact: a layer's tensors hold just the slots in use; a change makes new tensors beside the old ones and the
  switch swaps them. Nothing is kept in reserve; peak memory is old + new.
- reserved: the tensors hold `slot_floor` slots from the start; a change fills free slots in place and the
  switch is an update of the map. Addresses never change, which captured graphs need.

Invariant: the live map never names a slot that a change writes to.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Slots = tuple[int | None, ...]
_MAIN_TENSORS = ("w13_weight", "w2_weight")


@dataclass(slots=True)
class StagedExperts:
    """What a switch installs: per layer the tensors by name, and the slots they follow."""

    slots: Slots
    tensors: list[dict[str, torch.Tensor]] = field(default_factory=list)


class ExpertLayers:
    """All MoE layers of a rank's model."""

    def __init__(self, model: Any, slots: Slots, num_experts: int, *, num_reserved_slots: int = 0) -> None:
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

        self._layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
        self._num_experts = num_experts
        self._num_reserved = num_reserved_slots
        self._slots: Slots = slots
        self._names = [self._tensor_names(layer) for layer in self._layers]
        for layer in self._layers:
            self._set_map(layer)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def slots(self) -> Slots:
        return self._slots

    def num_bytes(self) -> int:
        """Memory of all expert tensors, free slots included."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> Iterator[torch.Tensor]:
        """All expert tensors, free slots included."""
        for index in range(self.num_layers):
            yield from self._live(index).values()

    def by_layer(self) -> Iterator[list[torch.Tensor]]:
        """The expert tensors of each layer, in the order of `tensors_to_send`."""
        for index in range(self.num_layers):
            yield list(self._live(index).values())

    def stage(self, slots: Slots) -> StagedExperts:
        """Room for `slots`, the experts that this rank keeps already in place."""
        staged = StagedExperts(slots)
        for index in range(self.num_layers):
            live = self._live(index)
            staged.tensors.append({name: self._room(tensor, slots) for name, tensor in live.items()})
        return staged

    def tensors_to_send(self, layer: int, slot: int) -> list[torch.Tensor]:
        """The live tensors of one expert slot, in the order of `tensors_to_fill`."""
        return [tensor[slot] for tensor in self._live(layer).values()]

    def tensors_to_fill(self, staged: StagedExperts, layer: int, slot: int) -> list[torch.Tensor]:
        """The staged tensors of one expert slot, to be written in place."""
        return [tensor[slot] for tensor in staged.tensors[layer].values()]

    def install(self, staged: StagedExperts) -> None:
        """Serve from the staged tensors from now on."""
        self._slots = staged.slots
        for index, layer in enumerate(self._layers):
            self._replace(index, staged.tensors[index])
            self._set_map(layer)

    def release(self) -> int:
        """Give the memory of all experts back; returns the bytes. Only for a rank outside the group.

        Reserved slots stay where they are, for graphs: only the device's memory saver can free them.
        """
        if self._num_reserved:
            return 0
        num_bytes = self.num_bytes()
        self._slots = ()
        for index in range(self.num_layers):
            self._replace(index, {name: _empty(tensor, 0) for name, tensor in self._live(index).items()})
        return num_bytes

    def _room(self, tensor: torch.Tensor, slots: Slots) -> torch.Tensor:
        if self._num_reserved:
            return tensor
        room = _empty(tensor, len(slots))
        for slot, expert in enumerate(slots):
            if expert is None:
                room[slot].zero_()
            elif slot < len(self._slots) and self._slots[slot] == expert:
                room[slot].copy_(tensor[slot])
        return room

    def _live(self, index: int) -> dict[str, torch.Tensor]:
        layer = self._layers[index]
        return {name: _tensor(layer, name) for name in self._names[index]}

    def _replace(self, index: int, tensors: dict[str, torch.Tensor]) -> None:
        if not self._num_reserved:
            for name, tensor in tensors.items():
                self._layers[index].replace_expert_tensor(name, tensor)

    def _tensor_names(self, layer: Any) -> list[str]:
        num_slots = layer.w13_weight.shape[0]
        return [*_MAIN_TENSORS, *(name for name, _ in layer.named_per_expert_tensors(num_slots))]

    def _set_map(self, layer: Any) -> None:
        slot_of = [-1] * self._num_experts
        for slot, expert in enumerate(self._slots):
            if expert is not None:
                slot_of[expert] = slot
        new = torch.tensor(slot_of, dtype=torch.int32, device=layer.w13_weight.device)
        dispatcher = layer.dispatcher
        if dispatcher.local_expert_mapping is None:
            dispatcher.local_expert_mapping = new
        else:
            # In place: a captured graph reads the map at this address.
            dispatcher.local_expert_mapping.copy_(new)
        # Where it equals the number of experts, SGLang's kernels take every expert for local and fail on -1.
        # So it counts the slots in use: a floor of 1 reserves as many slots as there are experts.
        num_slots = slots_in_use(self._slots) if self._num_reserved else len(self._slots)
        layer.num_local_experts = layer.moe_runner_config.num_local_experts = num_slots


def create_reserved(create: Callable[..., None], layer: Any, num_own: int, num_slots: int) -> None:
    """Make a layer's weights with `num_slots` expert slots, its own experts in the first ones.

    At the creation, not by a copy after the load: memory of the smaller tensors would stay with the memory
    saver's pool, and the larger ones would lie outside of what it can free.
    """
    create(num_slots)
    for name in _MAIN_TENSORS:
        _tensor(layer, name)[num_own:].zero_()


def _tensor(layer: Any, name: str) -> torch.Tensor:
    tensor: torch.Tensor = getattr(layer, name)
    return tensor.data


def _empty(like: torch.Tensor, num_slots: int) -> torch.Tensor:
    return like.new_empty((num_slots, *like.shape[1:]))


def slots_in_use(slots: Sequence[int | None]) -> int:
    """How many of the slots hold an expert."""
    return sum(expert is not None for expert in slots)
