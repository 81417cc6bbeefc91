"""Hooks on sglang.srt.managers.schedule_batch."""

from typing import Any

from sglang_patches import iteration_log


def count_retractions(result: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `ScheduleBatch.retract_decode`."""
    if (log := iteration_log.current()) is not None:
        retracted, _new_token_ratio, _aborted = result
        log.count_retracted(len(retracted))
