"""The data-parallel controller's part: where a request may go."""

from collections.abc import Callable
from typing import Any

_INACTIVE = "_flexfloor_inactive"
_NEVER = 1 << 60


def refresh(controller: Any) -> None:
    """Make every policy skip the ranks that are not routed to."""
    controller._refresh_active_workers()
    inactive = [rank for rank, is_routed in enumerate(controller.status) if not is_routed]
    setattr(controller.dp_budget, _INACTIVE, inactive)


def deliver_to_named_rank(original: Callable[..., bool], controller: Any, request: Any) -> bool:
    """A request that names its rank goes there: a parked rank is woken by it, a draining one serves it.

    SGLang would end the controller, and with it the server, where the rank is not active.
    """
    rank = request.routed_dp_rank
    if rank is None or rank in controller._active_workers:
        return original(controller, request)
    if not 0 <= rank < len(controller.workers) or controller.workers[rank] is None:
        return original(controller, request)
    from sglang.srt.managers.data_parallel_controller import sock_send

    sock_send(controller.workers[rank], request)
    return True


def dispatch_to_active(original: Callable[..., Any], budget: Any, *args: Any, **kwargs: Any) -> Any:
    """The least loaded rank among those that are routed to."""
    inactive = getattr(budget, _INACTIVE, ())
    for counts in (budget.total_requests, budget.total_tokens):
        for rank in inactive:
            counts[rank] += _NEVER
    try:
        return original(budget, *args, **kwargs)
    finally:
        for counts in (budget.total_requests, budget.total_tokens):
            for rank in inactive:
                counts[rank] -= _NEVER
