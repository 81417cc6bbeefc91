"""The memory of a parked rank: what it gives back, and how it takes it again before it returns."""

import logging
from collections.abc import Collection, Iterator
from typing import Any

import torch

from sglang_patches.elastic.expert_slots import ExpertLayers
from sglang_patches.elastic.memory import (
    CpuMemory,
    DeviceMemory,
    HostCopies,
    dense_tensors,
    kv_tensors,
    other_tensors,
    saved_kv_tensors,
)

logger = logging.getLogger(__name__)

FREEABLE = ("experts", "kv", "dense")


class ParkedMemory:
    """`release` runs in the scheduler's thread at park, `resume` in the background before the return."""

    def __init__(self, scheduler: Any, experts: ExpertLayers, frees: Collection[str]) -> None:
        self._scheduler = scheduler
        self._experts = experts
        self._frees = frozenset(frees)
        self._model = scheduler.tp_worker.model_runner.model
        self._is_cpu = scheduler.tp_worker.model_runner.device == "cpu"
        self._memory: Any = CpuMemory() if self._is_cpu else DeviceMemory(scheduler.memory_saver_adapter)
        self._copies = HostCopies()
        self.loses_dense: bool = self._memory.loses_dense(self._frees)
        """Whether a rank that returns has to receive its dense weights too. The same on all ranks."""

    def release(self) -> int:
        """Give back what the configuration says; returns the bytes."""
        num_bytes = 0
        if "experts" in self._frees:
            num_bytes += self._experts.release()
        if "kv" in self._frees and self._scheduler.flush_cache():
            # Cached prefixes go with the pool: a rank that returns starts with an empty one.
            num_bytes += self._memory.release("kv", self._kv())
        if self.loses_dense:
            num_bytes += self._memory.release("dense", self._weights())
        self._memory.trim()
        return num_bytes

    def resume(self) -> None:
        """Take the KV pool and the weights' memory again; exact experts get theirs when they are staged."""
        self._memory.resume("kv")
        self._memory.resume("dense")
        self._copies.restore()

    def _kv(self) -> Iterator[torch.Tensor]:
        return kv_tensors(self._scheduler) if self._is_cpu else saved_kv_tensors(self._scheduler)

    def _weights(self) -> Iterator[torch.Tensor]:
        if self._is_cpu:
            return dense_tensors(self._model)
        # The tag takes the whole model: what other ranks send back, and what is only here.
        sent = [*dense_tensors(self._model), *(t for t in self._experts.tensors() if t.numel())]
        self._copies.keep(other_tensors(self._model, sent))
        return iter(sent)
