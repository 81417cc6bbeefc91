"""Ports of a server that is started on this machine."""

import random
import socket

from flexfloor.errors import FlexfloorError

_FIRST_PORT, _LAST_PORT = 10_000, 32_000
"""Below the range that the kernel hands out to other sockets."""
_DERIVED_OFFSETS = (0, 13, *range(233, 250))
"""SGLang 0.5.23 takes these ports above its base port, with attention data parallelism up to 10 ranks."""


def free_base_port() -> int:
    """A base port whose derived ports are free as well, as far as can be told before they are taken.

    Random, because a server with attention data parallelism leaves its ports busy for a while after its end.
    """
    for _ in range(100):
        base = random.randrange(_FIRST_PORT, _LAST_PORT - max(_DERIVED_OFFSETS))
        if all(_is_free(base + offset) for offset in _DERIVED_OFFSETS):
            return base
    raise FlexfloorError(f"no free block of ports for the server between {_FIRST_PORT} and {_LAST_PORT}")


def free_block(count: int) -> int:
    """The first of `count` free ports in a row, for services whose ports a job has to tell other nodes."""
    for _ in range(100):
        first = random.randrange(_FIRST_PORT, _LAST_PORT - count)
        if all(_is_free(first + offset) for offset in range(count)):
            return first
    raise FlexfloorError(f"no {count} free ports in a row between {_FIRST_PORT} and {_LAST_PORT}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
