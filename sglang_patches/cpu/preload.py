"""A server's processes forked from one that has done SGLang's imports, instead of importing them in each.

    server --starts--> fork server (imports once) --forks--> controller, detokenizer, every rank

Spawning costs 13 CPU-seconds of imports per process, the same in all of them, and a server of 4 ranks has 7
processes. Without a GPU nothing is initialised by the imports that a fork could break: no CUDA context, and
with one thread per rank no pool of threads.

Invariant: a process finds the environment that its parent had when it started it, as if spawned. The fork
server dies with the server, and its children with it, so nothing outlives a killed server.
"""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import context, forkserver
from multiprocessing.popen_forkserver import Popen
from typing import Any

_MODULES = ["sglang_patches.cpu.preloaded"]


class EnvironmentPopen(Popen):
    """A fork server's child with its parent's environment of now, not that of the fork server's start."""

    def __init__(self, process: Any) -> None:
        process._target = _WithEnvironment(dict(os.environ), process._target)
        super().__init__(process)


class _WithEnvironment:
    def __init__(self, environment: dict[str, str], target: Callable[..., object]) -> None:
        self._environment = environment
        self._target = target

    def __call__(self, *args: object, **kwargs: object) -> object:
        for name in set(os.environ) - set(self._environment):
            del os.environ[name]
        # Only what differs: setproctitle finds a process's title through its first variables in memory.
        for name, value in self._environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        return self._target(*args, **kwargs)


def start_fork_server() -> None:
    """Start the fork server, which imports while the caller goes on with its own imports."""
    forkserver.set_forkserver_preload(_MODULES)
    forkserver.ensure_running()


def fork_from_now_on() -> None:
    """Make `multiprocessing.Process` of this process fork from the fork server."""
    context.ForkServerProcess._Popen = staticmethod(EnvironmentPopen)  # type: ignore[assignment, method-assign]
    forkserver.set_forkserver_preload(_MODULES)
    multiprocessing.set_start_method("forkserver", force=True)
