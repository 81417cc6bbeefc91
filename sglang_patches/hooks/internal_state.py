"""Hooks on sglang.srt.managers.scheduler_components.internal_state."""

import os
from typing import Any

from sglang_patches import iteration_log
from sglang_patches.counters import IterationCounters


def report_iterations(reply: Any, controller: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `SchedulerInternalStateController.get_internal_state`: adds the key `flexfloor` to the state."""
    from torch.distributed import distributed_c10d

    counters = IterationCounters.of(controller.scheduler)
    # Who reads the counters may cut the log by them.
    iteration_log.flush()
    reply.internal_state["flexfloor"] = {
        "dp_rank": iteration_log.own_rank(),
        "pid": os.getpid(),
        "num_process_groups": len(distributed_c10d._world.pg_map),
        **counters.as_dict(),
    }
