"""Servers of one checkpoint on 1 rank, on 2 over gloo and on 4 over shared memory."""

from collections.abc import Iterator

import pytest
from server import Server
from shared_server import SharedServer, SmallServers


@pytest.fixture(scope="module")
def servers(small_servers: SmallServers, shared_server: SharedServer) -> Iterator[dict[str, Server]]:
    """`one`, `gloo` and `shm`; the first two end with the module, because nobody else needs them."""
    ready = small_servers.wait_ready()
    yield ready | {"shm": Server(url=shared_server.wait_ready(), num_ranks=4)}
    small_servers.stop()
