"""What a parked rank gives back and takes again: KV pool, dense weights, the allocator's own reserve."""

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

_SAVER_TAGS = {"kv": "kv_cache", "dense": "weights"}


class CpuMemory:
    """Frees the storage under tensors that stay where they are, so that nobody's reference goes stale."""

    def __init__(self) -> None:
        self._freed: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}

    def release(self, what: str, tensors: Iterator[torch.Tensor]) -> int:
        """Free the tensors' memory, whose contents are lost; returns the bytes."""
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        freed = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in freed:
            storage.resize_(0)
        self._freed[what] = freed
        return sum(num_bytes for _, num_bytes in freed)

    def resume(self, what: str) -> None:
        """Take the memory again, zeroed."""
        for storage, num_bytes in self._freed.pop(what, []):
            storage.resize_(num_bytes)
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()

    def trim(self) -> None:
        """Hand freed memory to the kernel: glibc keeps it once large blocks have been freed before."""
        ctypes.CDLL(None).malloc_trim(0)


class DeviceMemory:
    """The same on a GPU, through SGLang's memory saver: addresses stay, pages go. Not yet run on a GPU."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._paused: set[str] = set()

    def release(self, what: str, tensors: Iterator[torch.Tensor]) -> int:
        """As `CpuMemory.release`. Nothing is freed where the server runs without --enable-memory-saver."""
        if not self._adapter.enabled:
            return 0
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self._adapter.pause(_SAVER_TAGS[what])
        self._paused.add(what)
        return num_bytes

    def resume(self, what: str) -> None:
        """As `CpuMemory.resume`."""
        if what in self._paused:
            self._paused.remove(what)
            self._adapter.resume(_SAVER_TAGS[what])

    def trim(self) -> None:
        """The memory saver returns pages at once."""


def kv_tensors(scheduler: Any) -> Iterator[torch.Tensor]:
    """All buffers of the rank's KV pool."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    for name in ("k_buffer", "v_buffer", "kv_buffer"):
        buffers = getattr(pool, name, None)
        if buffers is not None:
            yield from buffers


def dense_tensors(model: Any) -> Iterator[torch.Tensor]:
    """Everything but the experts, in the same order on every rank."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    experts = {
        id(tensor)
        for module in model.modules()
        if isinstance(module, FusedMoE)
        for tensor in (*module.parameters(), *module.buffers())
    }
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in experts and tensor.numel():
            yield tensor.data
