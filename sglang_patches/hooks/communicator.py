"""Hooks on sglang.srt.managers.communicator."""

from collections.abc import Callable
from typing import Any


async def fence_call(original: Callable[..., Any], communicator: Any, request: Any) -> Any:
    """Around `FanOutCommunicator.__call__`: as many ranks answer as are in the group, till all have."""
    from sglang_patches.elastic import serving

    membership = serving.current()
    if membership is None:
        return await original(communicator, request)
    async with membership.fence(type(request).__name__) as num_ranks:
        communicator.set_fan_out(num_ranks)
        reply = await membership.losses.answered(original(communicator, request), type(request).__name__)
    version = getattr(request, "weight_version", None) or getattr(request, "new_version", None)
    if all(getattr(answer, "success", True) for answer in reply):
        membership.record_weights(version)
    return reply
