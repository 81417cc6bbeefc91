"""Hooks on sglang.srt.managers.tokenizer_manager."""

from collections.abc import Callable
from typing import Any


def start_server_side(_result: Any, tokenizer_manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `TokenizerManager.__init__`."""
    from sglang_patches import server_side

    server_side.start(tokenizer_manager)


def take_request(_tokenizer_manager: Any, message: Any) -> None:
    """Before `TokenizerManager._dispatch_to_scheduler`, through which requests and control calls go."""
    from sglang_patches import server_side

    side = server_side.current()
    if side is None:
        return
    if type(message).__name__ == "ShutdownReq":
        side.shut_down()
    for request in getattr(message, "batch", (message,)):
        if hasattr(request, "routed_dp_rank"):
            side.take_request(request)


def send_waiting_routing(original: Callable[..., Any], tokenizer_manager: Any) -> None:
    """Around `TokenizerManager.auto_create_handle_loop`, which every request calls."""
    from sglang_patches.elastic import serving

    is_first = tokenizer_manager.event_loop is None
    original(tokenizer_manager)
    membership = serving.current()
    if is_first and membership is not None:
        membership.loop_started()


async def fence_pause(original: Callable[..., Any], tokenizer_manager: Any, request: Any) -> Any:
    """Around `TokenizerManager.pause_generation` and `continue_generation`."""
    from sglang_patches.elastic import serving

    membership = serving.current()
    if membership is None:
        return await original(tokenizer_manager, request)
    async with membership.fence(type(request).__name__):
        return await original(tokenizer_manager, request)


async def fence_disk_update(original: Callable[..., Any], tokenizer_manager: Any, request: Any) -> Any:
    """Around `TokenizerManager._wait_for_model_update_from_disk`."""
    from sglang_patches.elastic import serving

    membership = serving.current()
    if membership is None:
        return await original(tokenizer_manager, request)
    try:
        async with membership.fence(type(request).__name__):
            reply = await membership.losses.answered(
                original(tokenizer_manager, request), type(request).__name__
            )
    except serving.CallRefused as refused:
        return False, str(refused), 0
    if reply[0]:
        membership.record_weights(request.weight_version)
    return reply
