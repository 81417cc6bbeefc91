"""Hooks on sglang.srt.managers.scheduler_components.dp_attn."""

from collections.abc import Callable
from typing import Any


def exchange_sync_rows_over_shm(
    original: Callable[..., Any], global_flat: Any, local_row: Any, group: Any
) -> None:
    """Around `exchange_sync_rows`, the exchange of batch sizes that opens every iteration."""
    from sglang_patches.cpu import shm_groups

    memory = shm_groups.of_process_group(group)
    if memory is None:
        original(global_flat, local_row, group)
    else:
        memory.all_gather(global_flat, local_row)
