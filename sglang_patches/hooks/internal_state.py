"""Hooks on sglang.srt.managers.scheduler_components.internal_state."""

import os
from typing import Any

from sglang_patches.counters import IterationCounters


def report_iterations(reply: Any, controller: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `SchedulerInternalStateController.get_internal_state`: adds the key `flexfloor` to the state."""
    import torch
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    # Launch ranks: a rank's place in a group that has shrunk would name another rank after the next change.
    dp_rank = torch.distributed.get_rank() if parallel.attn_dp_enabled else parallel.dp_rank or 0
    counters = IterationCounters.of(controller.scheduler)
    reply.internal_state["flexfloor"] = {
        "dp_rank": dp_rank,
        "pid": os.getpid(),
        **counters.as_dict(),
    }
