"""Hooks on sglang.srt.distributed.parallel_state."""

from collections.abc import Callable
from typing import Any


def reduce_scatterv_over_gloo(group: Any, input_: Any, output: Any = None, sizes: Any = None) -> Any:
    """Instead of `GroupCoordinator.reduce_scatterv`."""
    return group._deterministic_reduce_scatterv(input_, output, sizes)


def reduce_scatterv_over_shm(group: Any, input_: Any, output: Any = None, sizes: Any = None) -> Any:
    """Instead of `GroupCoordinator.reduce_scatterv`."""
    from sglang_patches.cpu import shm_groups

    memory = shm_groups.of(group)
    if memory is None:
        return reduce_scatterv_over_gloo(group, input_, output, sizes)
    return shm_groups.reduce_scatterv(memory, input_, output, sizes)


def all_reduce_over_shm(original: Callable[..., Any], group: Any, input_: Any) -> Any:
    """Around `GroupCoordinator.all_reduce`."""
    from sglang_patches.cpu import shm_groups

    memory = shm_groups.of(group)
    return original(group, input_) if memory is None else memory.all_reduce(input_)


def all_gather_over_shm(original: Callable[..., Any], group: Any, output: Any, input: Any) -> None:
    """Around `GroupCoordinator._all_gather_into_tensor`."""
    from sglang_patches.cpu import shm_groups

    memory = shm_groups.of(group)
    if memory is None:
        original(group, output, input)
    else:
        memory.all_gather(output, input)


def share_gloo_device(*_args: Any, **_kwargs: Any) -> None:
    """Before `init_distributed_environment`."""
    from sglang_patches.cpu.gloo import share_device

    share_device()
