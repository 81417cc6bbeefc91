"""Hooks on sglang.srt.model_executor.model_runner."""

from typing import Any


def skip_batch_invariant_mode(_runner: Any) -> None:
    """Instead of `ModelRunner.maybe_enable_batch_invariant_mode`."""
