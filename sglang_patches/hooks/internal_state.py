"""Hooks on sglang.srt.managers.scheduler_components.internal_state."""

from typing import Any

from sglang_patches.counters import IterationCounters


def report_iterations(reply: Any, controller: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `SchedulerInternalStateController.get_internal_state`: adds the key `flexfloor` to the state."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    dp_rank = parallel.attn_dp_rank if parallel.attn_dp_size > 1 else parallel.dp_rank or 0
    counters = IterationCounters.of(controller.scheduler)
    reply.internal_state["flexfloor"] = {"dp_rank": dp_rank, **counters.as_dict()}
