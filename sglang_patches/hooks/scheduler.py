"""Hooks on sglang.srt.managers.scheduler."""

from collections.abc import Callable
from typing import Any

from sglang_patches import iteration_log
from sglang_patches.counters import IterationCounters


def count_iteration(scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before `Scheduler.run_batch`."""
    IterationCounters.of(scheduler).count(
        is_idle=batch.forward_mode.is_idle(),
        is_prefill=batch.is_extend_in_batch or batch.forward_mode.is_extend(),
    )
    if (log := iteration_log.current()) is not None:
        log.record(batch)


def nap_when_idle(_result: Any, _scheduler: Any) -> None:
    """After `Scheduler.on_idle`, which runs when no rank of the group has tokens."""
    from sglang_patches.cpu.patience import nap

    nap()


def skip_discarded(
    original: Callable[..., None], scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> None:
    """Around `Scheduler.process_batch_result`."""
    from sglang_patches.elastic import start

    runtime = start.current()
    if runtime is None or not runtime.is_discarded(result):
        original(scheduler, batch, result, *args, **kwargs)


def start_elastic_runtime(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `Scheduler.__init__`."""
    from sglang_patches.elastic import start

    start.start(scheduler)


def apply_membership(_scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before `Scheduler.ingest_requests`, the top of every event loop."""
    from sglang_patches.elastic import start

    runtime = start.current()
    if runtime is not None:
        runtime.at_loop_top()


def rename_weights(_result: Any, _scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `Scheduler.handle_update_weight_version`."""
    from sglang_patches.elastic import start

    runtime = start.current()
    if runtime is not None:
        runtime.rename_weights()
