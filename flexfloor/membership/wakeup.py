"""A file descriptor that another thread makes readable, so that a poll without a timeout ends."""

import contextlib
import os


class Wakeup:
    """`set` may be called from any thread and never blocks. Not after `close`."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def set(self) -> None:
        # A full pipe is readable anyway.
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write_fd)
