"""Hooks on sglang.srt.managers.data_parallel_controller."""

from collections.abc import Callable
from typing import Any


def wait_for_requests(controller: Any) -> None:
    """Before `DataParallelController.event_loop`."""
    from sglang_patches.cpu.patience import PatientSocket

    controller.recv_from_tokenizer = PatientSocket(controller.recv_from_tokenizer)


def update_routing(original: Callable[..., None], controller: Any, message: Any) -> None:
    """Around `DataParallelController.update_active_ranks`."""
    from sglang_patches.elastic import routing

    routing.update(original, controller, message)


def send_control_to_first_member(original: Callable[..., None], controller: Any, message: Any) -> None:
    """Around `DataParallelController.send_control_message`."""
    from sglang_patches.elastic import routing

    routing.send_control(original, controller, message)


def deliver_to_named_rank(original: Callable[..., Any], controller: Any, request: Any) -> Any:
    """Around `DataParallelController.maybe_external_dp_rank_routing`."""
    from sglang_patches.elastic import routing

    return routing.deliver_to_named_rank(original, controller, request)


def dispatch_to_active(original: Callable[..., Any], budget: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `DPBudget.dispatch`."""
    from sglang_patches.elastic import routing

    return routing.dispatch_to_active(original, budget, *args, **kwargs)
