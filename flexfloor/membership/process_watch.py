"""Sees processes of this machine end, the moment they do, and makes them end."""

import os
import select
import signal
import socket
from contextlib import suppress


def this_node() -> str:
    """The machine as a HelloMsg names it: SLURM's node name, or else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


class ProcessWatch:
    """By pidfd: it names one life of a process, so a pid that is given anew can neither be missed nor killed.

    For one thread.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._fds: dict[int, int] = {}
        self._gone: list[int] = []

    @property
    def fd(self) -> int:
        """Readable while `ended` has something to tell of a process that lived when it was added."""
        return self._epoll.fileno()

    def add(self, ep_rank: int, pid: int) -> None:
        if ep_rank in self._fds:
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone.append(ep_rank)
            return
        self._fds[ep_rank] = fd
        self._epoll.register(fd, select.EPOLLIN)

    def watches(self, ep_rank: int) -> bool:
        return ep_rank in self._fds

    def ended(self) -> list[int]:
        """Ranks whose process has ended since the last call."""
        ready = {fd for fd, _ in self._epoll.poll(0)}
        found, self._gone = self._gone, []
        for ep_rank, fd in list(self._fds.items()):
            if fd in ready:
                self._forget(ep_rank)
                found.append(ep_rank)
        return found

    def kill(self, ep_rank: int) -> None:
        """SIGKILL, which ends a stopped process too. Nothing happens to a rank that is not watched."""
        if ep_rank in self._fds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fds[ep_rank], signal.SIGKILL)

    def close(self) -> None:
        for ep_rank in list(self._fds):
            self._forget(ep_rank)
        self._epoll.close()

    def _forget(self, ep_rank: int) -> None:
        fd = self._fds.pop(ep_rank)
        self._epoll.unregister(fd)
        os.close(fd)
