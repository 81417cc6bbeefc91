"""The memory of a parked rank: what it gives back, and how it takes it again before it returns."""

import logging
from collections.abc import Collection
from typing import Any

from sglang_patches.elastic.expert_slots import ExpertLayers
from sglang_patches.elastic.memory import CpuMemory, DeviceMemory, dense_tensors, kv_tensors

logger = logging.getLogger(__name__)

FREEABLE = ("experts", "kv", "dense")


class ParkedMemory:
    """`release` runs in the scheduler's thread at park, `resume` in the background before the return."""

    def __init__(self, scheduler: Any, experts: ExpertLayers, frees: Collection[str]) -> None:
        self._scheduler = scheduler
        self._experts = experts
        self._frees = frozenset(frees)
        self._model = scheduler.tp_worker.model_runner.model
        is_cpu = scheduler.tp_worker.model_runner.device == "cpu"
        self._memory: Any = CpuMemory() if is_cpu else DeviceMemory(scheduler.memory_saver_adapter)

    def release(self) -> int:
        """Give back what the configuration says; returns the bytes."""
        num_bytes = 0
        if "experts" in self._frees:
            num_bytes += self._experts.release()
        if "kv" in self._frees and self._scheduler.flush_cache():
            # Cached prefixes go with the pool: a rank that returns starts with an empty one.
            num_bytes += self._memory.release("kv", kv_tensors(self._scheduler))
        if "dense" in self._frees:
            num_bytes += self._memory.release("dense", dense_tensors(self._model))
        self._memory.trim()
        return num_bytes

    def resume(self) -> None:
        """Take the KV pool and the dense weights' memory again; experts get theirs when they are staged."""
        self._memory.resume("kv")
        self._memory.resume("dense")
