"""Hooks on sglang.srt.utils.watchdog."""

from collections.abc import Callable
from typing import Any


def leave_lost_ranks(original: Callable[..., bool], watchdog: Any) -> bool:
    """Around `SubprocessWatchdog._check_processes`, which ends the server when a process of it has died."""
    from sglang_patches.elastic import serving

    membership = serving.current()
    if membership is not None and membership.recovers:
        rows = [
            (process, name)
            for process, name in zip(watchdog._processes, watchdog._names, strict=True)
            if process.is_alive() or not membership.is_rank(process.pid)
        ]
        watchdog._processes = [process for process, _ in rows]
        watchdog._names = [name for _, name in rows]
    return original(watchdog)
