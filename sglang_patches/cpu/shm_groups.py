"""Gives SGLang's EP group its shared memory, at the group's first collective."""

import pickle
from typing import Any

import torch

from sglang_patches.cpu.shm_collectives import SharedMemoryGroup, connect

ATTRIBUTE = "_flexfloor_shared_memory"
"""Of a GroupCoordinator: its SharedMemoryGroup, from its first collective on."""
_GROUP_NAME = "tp"
"""With EP = attention-DP = TP this one group carries every collective of the model and of the scheduler."""


def of(coordinator: Any) -> SharedMemoryGroup | None:
    """The shared memory of a GroupCoordinator; None when its collectives stay with gloo.

    The first call on the group is a collective itself: every rank of the group must make it.
    """
    if coordinator.world_size == 1 or coordinator.unique_name.partition(":")[0] != _GROUP_NAME:
        return None
    memory: SharedMemoryGroup | None = getattr(coordinator, ATTRIBUTE, None)
    if memory is None:
        memory = _connect(coordinator)
        setattr(coordinator, ATTRIBUTE, memory)
    return memory


def of_process_group(process_group: Any) -> SharedMemoryGroup | None:
    """The same for a process group, which must belong to the TP coordinator."""
    from sglang.srt.runtime_context import get_parallel

    coordinator = get_parallel().tp_group
    if process_group not in (coordinator.cpu_group, coordinator.device_group):
        return None
    return of(coordinator)


def reduce_scatterv(
    memory: SharedMemoryGroup, tensor: torch.Tensor, output: torch.Tensor | None, sizes: list[int] | None
) -> torch.Tensor:
    """Sum over ranks and keep this rank's rows: `sizes` rows per rank, or as many for each when None.

    tensor: [sum(sizes), ...]. Returns [sizes[rank], ...], which is `output` when that is given.
    """
    if sizes is None:
        sizes = [tensor.shape[0] // memory.world_size] * memory.world_size
    assert tensor.shape[0] == sum(sizes)
    if output is None:
        output = tensor.new_empty((sizes[memory.rank], *tensor.shape[1:]))
    return memory.reduce_scatter(tensor, output, offset=sum(sizes[: memory.rank]))


def broadcast_objects(memory: SharedMemoryGroup, objects: list[Any] | None, is_source: bool) -> list[Any]:
    """The source's list on every rank. Most lists are empty: that costs one exchange of eight bytes.

    Objects are pickled, as SGLang does it: only processes of one server share the memory.
    """
    payload = pickle.dumps(objects) if is_source and objects else b""
    sizes = torch.empty(memory.world_size, dtype=torch.int64)
    memory.all_gather(sizes, torch.tensor([len(payload)]))
    num_bytes = int(sizes.sum())
    if num_bytes == 0:
        return []
    mine = torch.zeros(num_bytes, dtype=torch.uint8)
    if payload:
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    received = memory.all_reduce(mine)  # all others are zero, so the sum is the source's
    objects_of_source: list[Any] = (
        objects if is_source and objects else pickle.loads(received.numpy().tobytes())
    )
    return objects_of_source


def _connect(coordinator: Any) -> SharedMemoryGroup:
    def all_gather_object(value: object) -> list[object]:
        gathered: list[object] = [None] * coordinator.world_size
        torch.distributed.all_gather_object(gathered, value, group=coordinator.cpu_group)
        return gathered

    return connect(coordinator.rank_in_group, coordinator.world_size, all_gather_object)
