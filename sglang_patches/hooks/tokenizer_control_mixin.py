"""Hooks on sglang.srt.managers.tokenizer_control_mixin."""

from collections.abc import Callable
from typing import Any


async def leave_out_absent_ranks(
    original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around `TokenizerControlMixin.get_loads`."""
    from sglang_patches.elastic import serving

    loads = await original(manager, *args, **kwargs)
    membership = serving.current()
    if membership is None:
        return loads
    members = membership.manager.status().members
    return [load for load in loads if load.dp_rank in members]
