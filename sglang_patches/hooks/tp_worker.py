"""Hooks on sglang.srt.managers.tp_worker."""

from collections.abc import Callable
from functools import partial
from typing import Any


def forward_or_recover(
    original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around `TpModelWorker.forward_batch_generation`."""
    from sglang_patches.elastic import start

    runtime = start.current()
    if runtime is None or batch is None:
        return original(worker, batch, *args, **kwargs)
    return runtime.forward(partial(original, worker, batch, *args, **kwargs), batch, _idle_result)


def _idle_result() -> Any:
    """What an idle batch's pass returns."""
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.utils import GenerationBatchResult

    return GenerationBatchResult(
        logits_output=LogitsProcessorOutput(next_token_logits=None),
        next_token_ids=torch.empty(0, dtype=torch.int64),
        can_run_cuda_graph=False,
    )
