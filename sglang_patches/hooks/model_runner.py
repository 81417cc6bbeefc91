"""Hooks on sglang.srt.model_executor.model_runner."""

from typing import Any


def skip_batch_invariant_mode(_runner: Any) -> None:
    """Instead of `ModelRunner.maybe_enable_batch_invariant_mode`."""


def reserve_expert_slots(_result: Any, runner: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `ModelRunner.load_model`: before SGLang divides the memory that is left among KV caches."""
    from sglang_patches.elastic import start

    start.reserve_slots(runner)
