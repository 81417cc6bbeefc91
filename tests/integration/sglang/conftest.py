"""Servers of one checkpoint on 1 rank, on 4 over gloo and on 4 over shared memory.

They start together, because a start is mostly imports. The shared server is the one over shared memory; the
other two end with the module, because they are of no use to anybody else.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server import Server, start_server
from shared_server import SharedServer

from flexfloor.processes import ChildProcesses


@pytest.fixture(scope="module")
def servers(
    shared_server: SharedServer,
    shared_checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Server]]:
    """`one`, `gloo` and `shm`."""
    folder = tmp_path_factory.mktemp("servers")
    with ChildProcesses() as children:
        started = {
            "one": start_server(children, shared_checkpoint, 1, folder / "one.log"),
            "gloo": start_server(children, shared_checkpoint, 4, folder / "gloo.log"),
        }
        ready = {name: server.wait_ready() for name, server in started.items()}
        yield ready | {"shm": Server(url=shared_server.wait_ready(), num_ranks=4)}
