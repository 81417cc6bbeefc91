"""One gloo device for all groups of a process, and a way to break a group from another thread.

Every gloo group makes a device of its own, with a thread that looks 100 times a second whether anything has
come. A rank has some twenty groups, most of them of one rank: that alone takes 3 % of a core from a rank that
waits, and wakes its neighbours' cores two thousand times a second.

Breaking: `abort` of torch's gloo groups does nothing, and a group cannot be destroyed while one of its own
operations blocks. So whoever makes a group records its connections, and `break_connections` shuts them
down, which ends the wait here and at every peer.
"""

import os
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

_WORKER_THREADS = 2
"""What torch gives a group by default."""
_Gloo: Any = distributed_c10d.ProcessGroupGloo

Connection = tuple[int, int]
"""(descriptor, inode): a descriptor alone may stand for another file later."""
_recording = threading.local()


class SharedDeviceGloo(_Gloo):  # type: ignore[misc]
    """torch's gloo group on the process's one device."""

    _device: Any = None

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = _Gloo._Options()
        options._devices = [self._shared_device()]
        options._timeout = timeout
        options._threads = _WORKER_THREADS
        before = frozenset(_connections()) if hasattr(_recording, "connections") else frozenset()
        super().__init__(store, rank, size, options)
        # Gloo connects all pairs here, over tcp. A connection that another thread opens meanwhile may be
        # among them; ZeroMQ's, the only other ones of a rank, come back by themselves.
        found = getattr(_recording, "connections", None)
        if found is not None:
            found |= frozenset(_connections()) - before

    @classmethod
    def _shared_device(cls) -> Any:
        if SharedDeviceGloo._device is None:
            SharedDeviceGloo._device = _Gloo.create_default_device()
        return SharedDeviceGloo._device


def share_device() -> None:
    """All gloo groups that this process makes from now on share a device."""
    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo  # type: ignore[misc]


@contextmanager
def recorded() -> Iterator[set[Connection]]:
    """The connections of all groups that this thread makes inside."""
    outer = getattr(_recording, "connections", None)
    found: set[Connection] = set()
    _recording.connections = found
    try:
        yield found
    finally:
        _recording.connections = outer


def break_connections(connections: Iterable[Connection]) -> int:
    """Shut them down, whoever waits on them; returns how many were still open. From any thread."""
    num_broken = 0
    for descriptor, inode in connections:
        with suppress(OSError):
            if _inode(descriptor) != inode:
                continue
            copy = socket.socket(fileno=os.dup(descriptor))
            try:
                copy.shutdown(socket.SHUT_RDWR)
                num_broken += 1
            finally:
                copy.close()
    return num_broken


def _connections() -> Iterator[Connection]:
    """This process's tcp connections. Not its listening sockets: gloo ends the process where one is shut."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            descriptor = int(name)
            inode = _inode(descriptor)
            if inode and _is_connection(descriptor):
                yield descriptor, inode


def _inode(descriptor: int) -> int:
    """Of a socket; 0 for any other file."""
    kind, _, rest = os.readlink(f"/proc/self/fd/{descriptor}").partition(":[")
    return int(rest[:-1]) if kind == "socket" else 0


def _is_connection(descriptor: int) -> bool:
    copy = socket.socket(fileno=os.dup(descriptor))
    try:
        is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
        return is_tcp and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    finally:
        copy.close()
