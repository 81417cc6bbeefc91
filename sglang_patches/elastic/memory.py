"""What a parked rank gives back and takes again: KV pool, weights, the allocator's own reserve."""

import ctypes
from collections.abc import Collection, Iterator
from typing import Any

import torch

_SAVER_TAGS = {"kv": "kv_cache", "dense": "weights"}


class CpuMemory:
    """Frees the storage under tensors that stay where they are, so that nobody's reference goes stale."""

    def __init__(self) -> None:
        self._freed: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}

    def loses_dense(self, frees: Collection[str]) -> bool:
        """Whether a rank that gave `frees` back must receive its dense weights when it returns."""
        return "dense" in frees

    def release(self, what: str, tensors: Iterator[torch.Tensor]) -> int:
        """Free the tensors' memory, whose contents are lost; returns the bytes. Nothing while it is freed."""
        if what in self._freed:
            return 0
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
    """The same on a GPU, through SGLang's memory saver: addresses stay, pages go. Not yet run on a GPU.

    The saver works by tag, and SGLang's tag `weights` holds everything that was allocated while the model
    was loaded: dense weights, experts, buffers, and tensors that are neither. So experts cannot go alone, and
    what no rank sends to a rank that returns has to be kept aside (see `HostCopies`).
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._paused: dict[str, list[torch.Tensor]] = {}

    def loses_dense(self, frees: Collection[str]) -> bool:
        """As `CpuMemory.loses_dense`; the same on all ranks, since they have the same flags."""
        return bool(self._adapter.enabled) and not {"experts", "dense"}.isdisjoint(frees)

    def release(self, what: str, tensors: Iterator[torch.Tensor]) -> int:
        """As `CpuMemory.release`. Nothing is freed where the server runs without --enable-memory-saver."""
        if not self._adapter.enabled:
            return 0
        paused = list(tensors)
        # The saver unmaps pages under whatever still runs.
        _synchronize(paused)
        self._adapter.pause(_SAVER_TAGS[what])
        self._paused[what] = paused
        return sum(tensor.nbytes for tensor in paused)

    def resume(self, what: str) -> None:
        """As `CpuMemory.resume`: new pages hold whatever was in them, so they are zeroed."""
        if what not in self._paused:
            return
        paused = self._paused.pop(what)
        self._adapter.resume(_SAVER_TAGS[what])
        with torch.inference_mode():
            for tensor in paused:
                tensor.zero_()
        _synchronize(paused)

    def trim(self) -> None:
        """Hand back what torch's allocator caches: exact expert slots are its own, not the saver's."""
        # It does nothing in a process without CUDA.
        torch.cuda.empty_cache()


class HostCopies:
    """Tensors that no other rank sends to a rank that returns, in host memory while their pages are gone."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensors: Iterator[torch.Tensor]) -> None:
        """Copy the tensors aside."""
        self._kept = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]

    def restore(self) -> None:
        """Copy them back, once."""
        with torch.inference_mode():
            for tensor, copy in self._kept:
                tensor.copy_(copy)
        self._kept = []


def kv_tensors(scheduler: Any) -> Iterator[torch.Tensor]:
    """All buffers of the rank's KV pool."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    for name in ("k_buffer", "v_buffer", "kv_buffer"):
        buffers = getattr(pool, name, None)
        if buffers is not None:
            yield from buffers


def saved_kv_tensors(scheduler: Any) -> Iterator[torch.Tensor]:
    """What the memory saver's tag `kv_cache` holds: the pool, and the table of the requests' slots in it.

    Row 0 of that table must be zero: padded rows of a CUDA graph look their slots up there.
    """
    yield from kv_tensors(scheduler)
    yield scheduler.req_to_token_pool.req_to_token


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


def other_tensors(model: Any, moved: Collection[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The model's tensors that are not among `moved`: parameters, buffers, and plain attributes of modules.

    Plain ones are, for example, weights of latent attention that are absorbed after the load.
    """
    seen = {tensor.data_ptr() for tensor in moved}
    for module in model.modules():
        plain = (value for value in vars(module).values() if isinstance(value, torch.Tensor))
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False), *plain)
        for tensor in own:
            if tensor.numel() and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield tensor.data


def _synchronize(tensors: list[torch.Tensor]) -> None:
    for device in {tensor.device for tensor in tensors}:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
