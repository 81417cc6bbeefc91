"""This rank's log of its counted iterations: a `flexfloor.iterations.RECORD` for each, in a file of its own.

Record i of `iterations-rank{ep_rank}.bin` is iteration i of the rank's counters, so counters that are read
before and after a step cut the step out of the file. Records reach the file when the buffer is full, when
counters are answered, before the rank parks, and at the end of the process.
"""

import logging
import os
import struct
import time
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Any

from sglang_patches import CONFIG_ENV, plugin_config

logger = logging.getLogger(__name__)

_RECORD = struct.Struct("<IIIHHI")
_BUFFER_BYTES = 4096
_MAX_U2 = 2**16 - 1
_MAX_U4 = 2**32 - 1


class IterationLog:
    """Used by the scheduler's thread only. A disk that fails ends the log, not the server."""

    def __init__(
        self, path: Path, epoch: Callable[[], int], clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        # A new process counts from 0 again: what an earlier one has left would shift its records.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self._path = path
        self._epoch = epoch
        self._clock_ns = clock_ns
        self._last_ns = 0
        self._num_retracted = 0
        self._buffer = bytearray()

    def record(self, batch: Any) -> None:
        """The batch that runs now, under the membership epoch that is in force now."""
        now_ns = self._clock_ns()
        took_us = (now_ns - self._last_ns) // 1000 if self._last_ns else 0
        context_tokens, prefill_tokens, num_running = _load_of(batch)
        self._buffer += _RECORD.pack(
            self._epoch(),
            context_tokens,
            prefill_tokens,
            min(num_running, _MAX_U2),
            min(self._num_retracted, _MAX_U2),
            min(took_us, _MAX_U4),
        )
        self._last_ns, self._num_retracted = now_ns, 0
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def count_retracted(self, num_requests: int) -> None:
        """Requests thrown back before the iteration that comes next."""
        self._num_retracted += num_requests

    def flush(self) -> None:
        """Hand everything recorded so far to the operating system."""
        try:
            while self._buffer and self._descriptor >= 0:
                del self._buffer[: os.write(self._descriptor, self._buffer)]
        except OSError as error:
            logger.error("flexfloor: the iteration log %s ends here: %s", self._path, error)
            os.close(self._descriptor)
            self._descriptor = -1
        self._buffer.clear()


def _load_of(batch: Any) -> tuple[int, int, int]:
    """(context_tokens, prefill_tokens, num_running) of this rank's part of the iteration."""
    mode = batch.forward_mode
    if mode.is_idle():
        return 0, 0, 0
    if mode.is_extend():
        # With mixed chunks the requests that decode along count as one new token each.
        return 0, batch.extend_num_tokens or 0, 0
    return _context_tokens(batch), 0, len(batch.reqs)


def _context_tokens(batch: Any) -> int:
    """Tokens that the batch attends to: the one that goes in now included, the one that comes out not."""
    if batch.seq_lens_cpu is not None:
        return int(batch.seq_lens_cpu.sum())
    return sum(len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs)


_log: IterationLog | None = None
_is_open = False


def current() -> IterationLog | None:
    """This process's log, opened by the first call; None where no log was asked for."""
    global _log, _is_open
    if not _is_open:
        _is_open = True
        _log = _open()
    return _log


def flush() -> None:
    """Flush the log, if there is one."""
    if _log is not None:
        _log.flush()


def own_rank() -> int:
    """Number of this process's attention-DP rank at launch: its ep_rank where a rank is a worker.

    A rank's place in a group that has shrunk would name another rank after the next change.
    """
    import torch
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return torch.distributed.get_rank() if parallel.attn_dp_enabled else parallel.dp_rank or 0


def _open() -> IterationLog | None:
    config_path = os.environ.get(CONFIG_ENV)
    config = None if config_path is None else plugin_config.read(config_path)
    if config is None or not config.iteration_log or not _speaks_for_its_worker():
        return None
    path = Path(config.iteration_log) / f"iterations-rank{own_rank()}.bin"
    log = IterationLog(path, _elastic_epoch if config.membership == "elastic" else _static_epoch)
    # Not atexit: the child processes of multiprocessing end without it.
    util.Finalize(None, log.flush, exitpriority=0)
    return log


def _speaks_for_its_worker() -> bool:
    """Of ranks that share their requests, the first one."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return not parallel.attn_tp_rank and not parallel.pp_rank


def _static_epoch() -> int:
    return 0


def _elastic_epoch() -> int:
    from sglang_patches.elastic import start

    runtime = start.current()
    return 0 if runtime is None else runtime.membership_epoch
