"""Hooks on sglang.srt.layers.quantization.unquant."""

from collections.abc import Callable
from functools import partial
from typing import Any


def create_expert_slots(
    original: Callable[..., None], method: Any, layer: Any, num_experts: int, *args: Any, **kwargs: Any
) -> None:
    """Around `UnquantizedFusedMoEMethod.create_weights`, whose `num_experts` are those of this rank."""
    from sglang_patches.elastic import start

    start.create_experts(partial(_create, original, method, layer, args, kwargs), layer, num_experts)


def _create(
    original: Callable[..., None], method: Any, layer: Any, args: Any, kwargs: Any, num_slots: int
) -> None:
    original(method, layer, num_slots, *args, **kwargs)
