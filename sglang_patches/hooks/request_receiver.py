"""Hooks on sglang.srt.managers.scheduler_components.request_receiver."""

from collections.abc import Callable
from typing import Any


def broadcast_requests(
    original: Callable[..., Any], receiver: Any, recv_reqs: Any, local_reqs: Any = None
) -> Any:
    """Around `SchedulerRequestReceiver._broadcast_reqs_across_ranks`."""
    from sglang_patches.elastic import start

    runtime = start.current()
    if runtime is None:
        return original(receiver, recv_reqs, local_reqs)
    received = runtime.broadcast(
        lambda requests: original(receiver, requests), receiver._split_work_and_control_reqs, recv_reqs
    )
    return [*(local_reqs or ()), *received]
