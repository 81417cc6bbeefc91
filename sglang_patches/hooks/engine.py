"""Hooks on sglang.srt.entrypoints.engine."""

from typing import Any


def fork_processes(*_args: Any, **_kwargs: Any) -> None:
    """Before `Engine._launch_scheduler_processes`."""
    from sglang_patches.cpu.preload import fork_from_now_on

    fork_from_now_on()
