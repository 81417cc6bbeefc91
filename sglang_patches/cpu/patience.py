"""Waiting instead of spinning: on a CPU, whoever spins takes the core from the ranks that compute."""

import time
from typing import Any

POLL_MS = 100
"""A message ends the wait at once; the loop around it only has a watchdog to feed meanwhile."""
NAP_S = 0.02
"""What a request that arrives at an idle engine may wait longer."""


class PatientSocket:
    """A ZeroMQ socket whose non-blocking receive waits up to POLL_MS for a message before it gives up."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def recv(self, flags: int = 0) -> Any:
        """As the socket's own `recv`."""
        self._socket.poll(POLL_MS)
        return self._socket.recv(flags=flags)

    def recv_pyobj(self, flags: int = 0) -> Any:
        """As the socket's own `recv_pyobj`."""
        self._socket.poll(POLL_MS)
        return self._socket.recv_pyobj(flags=flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def nap() -> None:
    """A short sleep."""
    time.sleep(NAP_S)
