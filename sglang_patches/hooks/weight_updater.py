"""Hooks on sglang.srt.managers.scheduler_components.weight_updater."""

from collections.abc import Callable
from functools import partial
from typing import Any


def begin_update(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around `SchedulerWeightUpdaterManager.begin_weight_update`."""
    return _update(original, updater, request, begins=True)


def end_update(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around `SchedulerWeightUpdaterManager.end_weight_update`."""
    return _update(original, updater, request, ends=True)


def update_part(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around `SchedulerWeightUpdaterManager.update_weights_from_tensor` and `..._from_distributed`."""
    return _update(original, updater, request)


def update_whole(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around `SchedulerWeightUpdaterManager.update_weights_from_disk` and `..._from_ipc`."""
    return _update(original, updater, request, begins=True, ends=True)


def _update(
    original: Callable[..., Any], updater: Any, request: Any, *, begins: bool = False, ends: bool = False
) -> Any:
    from sglang_patches.elastic import start

    runtime = start.current()
    call = partial(original, updater, request)
    return call() if runtime is None else runtime.update_weights(call, begins=begins, ends=ends)
