"""Imported by the fork server only: what its children need, and what makes it and them behave as spawned."""

import ctypes
import gc
import os
import signal
from multiprocessing import forkserver

import sglang.srt.managers.data_parallel_controller
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler
import sglang.srt.models.registry  # noqa: F401
from sglang.srt.utils import set_ulimit

from sglang_patches.cpu import preload

_PR_SET_PDEATHSIG = 1


def _share_fork_server() -> None:
    # CPython hands the address on to children, which start a fork server of their own all the same.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]


set_ulimit()
preload.fork_from_now_on()
os.register_at_fork(after_in_child=_share_fork_server)
# Children must not copy the pages of all that was imported just to mark it as reachable.
gc.collect()
gc.freeze()
ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
