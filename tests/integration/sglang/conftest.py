"""Three servers of one tiny model, started together because a start is mostly imports, shared by all tests."""

from collections.abc import Iterator

import pytest
from server import Server, start_server
from tiny_moe import write_checkpoint

from flexfloor.processes import ChildProcesses

COLLECTIVES = ("gloo", "shm")


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """`one` rank, and four ranks over `gloo` and over `shm`."""
    folder = tmp_path_factory.mktemp("servers")
    model_path = write_checkpoint(folder / "model")
    with ChildProcesses() as children:
        started = {"one": start_server(children, model_path, 1, folder / "one.log")}
        for collectives in COLLECTIVES:
            flags = ("--flexfloor-collectives", collectives)
            started[collectives] = start_server(children, model_path, 4, folder / f"{collectives}.log", flags)
        yield {name: server.wait_ready() for name, server in started.items()}
