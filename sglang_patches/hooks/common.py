"""Hooks on sglang.srt.utils.common."""

from collections.abc import Callable
from typing import Any


def broadcast_pyobj_over_shm(
    original: Callable[..., Any],
    data: Any,
    rank: int,
    dist_group: Any = None,
    src: int = 0,
    force_cpu_device: bool = True,
) -> Any:
    """Around `broadcast_pyobj`; `rank` and `src` are ranks of the world."""
    from sglang_patches.cpu import shm_groups

    memory = None if dist_group is None else shm_groups.of_process_group(dist_group)
    if memory is None:
        return original(data, rank, dist_group, src, force_cpu_device)
    return shm_groups.broadcast_objects(memory, data, is_source=rank == src)


def gather_with_one_rank(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around `require_mlp_tp_gather`, which takes attention DP of one rank for a mistake."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.attn_dp_enabled and parallel.num_dp_ranks == 1:
        return True
    return original(*args, **kwargs)
