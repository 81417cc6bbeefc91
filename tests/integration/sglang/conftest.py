"""Three servers of one tiny model, started together: a start is mostly imports. They end with the module,
because idle ranks spin."""

from collections.abc import Iterator

import pytest
from server import Server, start_server
from tiny_moe import write_checkpoint

from flexfloor.processes import ChildProcesses

NUM_RANKS = {"gloo": 4, "shm": 2}
"""By collectives. Shared memory among more ranks has unit tests; a rank more costs seconds of imports."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """`one` rank; several ranks over `gloo` and over `shm`."""
    folder = tmp_path_factory.mktemp("servers")
    model_path = write_checkpoint(folder / "model")
    with ChildProcesses() as children:
        started = {"one": start_server(children, model_path, 1, folder / "one.log")}
        for name, num_ranks in NUM_RANKS.items():
            flags = ("--flexfloor-collectives", name)
            started[name] = start_server(children, model_path, num_ranks, folder / f"{name}.log", flags)
        yield {name: server.wait_ready() for name, server in started.items()}
