"""The one thing that the manager needs of its socket."""

from collections.abc import Sequence
from typing import Protocol


class Wire(Protocol):
    """A ZeroMQ ROUTER socket, or what plays it."""

    def poll(self, timeout: int = ...) -> int: ...
    def recv_multipart(self) -> list[bytes]: ...
    def send_multipart(self, msg_parts: Sequence[bytes], flags: int = ...) -> object: ...
