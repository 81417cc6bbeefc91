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


def add_vote(local_row: Any, info: Any, *_args: Any, **_kwargs: Any) -> Any:
    """After `MLPSyncBatchInfo._get_local_tensor`: one more column, which SGLang's readers never look at."""
    from sglang_patches.elastic import start

    runtime = start.current()
    vote = 0 if runtime is None else runtime.vote(info.num_tokens)
    return _with_column(local_row, vote)


def add_no_vote(fallback_row: Any, _info: Any, *_args: Any, **_kwargs: Any) -> Any:
    """After `MLPSyncBatchInfo._get_fallback_tensor`: the row must be as wide as the local one."""
    return _with_column(fallback_row, -1)


def read_votes(_result: Any, info: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `MLPSyncBatchInfo.all_gather` and `finalize_local`."""
    from sglang_patches.elastic import start

    runtime = start.current()
    if runtime is not None:
        runtime.read_votes(info.tp0_info_cpu[:, -1].tolist())


def gather_or_recover(original: Callable[..., Any], adapter: Any, local_batch: Any) -> Any:
    """Around `SchedulerDPAttnAdapter.prepare_mlp_sync_batch`."""
    from sglang_patches.elastic import start

    runtime = start.current()
    if runtime is None:
        return original(adapter, local_batch)
    return runtime.gather(lambda: original(adapter, local_batch))


def _with_column(row: Any, value: int) -> Any:
    import torch

    return torch.cat([row, row.new_full((1,), value)])
