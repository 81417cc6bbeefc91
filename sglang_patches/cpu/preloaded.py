"""Imported by the fork server only: what its children need, and what makes it and them behave as spawned."""

import ctypes
import gc
import os
import signal
from multiprocessing import forkserver
from types import FrameType

import setproctitle
import sglang.srt.managers.data_parallel_controller
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler
import sglang.srt.managers.tokenizer_manager
import sglang.srt.models.registry  # noqa: F401
from sglang.srt.utils import set_ulimit

from sglang_patches.cpu import preload

_PR_SET_PDEATHSIG = 1


def _tell_server(signum: int, _frame: FrameType | None) -> None:
    # SGLang's processes report a failure to their parent, which should have been the server.
    os.kill(os.getppid(), signum)


def _behave_as_spawned() -> None:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    # CPython hands the address on to children, which start a fork server of their own all the same.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]


set_ulimit()
preload.fork_from_now_on()
os.register_at_fork(after_in_child=_behave_as_spawned)
signal.signal(signal.SIGQUIT, _tell_server)
setproctitle.getproctitle()
# Children must not copy the pages of all that was imported just to mark it as reachable.
gc.collect()
gc.freeze()
ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
