"""The shared server's last tests, and servers whose ranks die by plan."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "sglang"))

from faulty_server import FaultyServer
from server import Server
from shared_server import SharedServer


@pytest.fixture(scope="session")
def dying_server(
    shared_server: SharedServer,
    shared_server_url: str,
    shared_checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[FaultyServer]:
    """The shared server. Nothing that runs after these tests may need all of its ranks."""
    server = Server(url=shared_server_url, num_ranks=4)
    # Also a mirror that was written by an update, and not at the start.
    server.post("update_weights_from_disk", model_path=str(shared_checkpoint), weight_version="9000")
    faulty = FaultyServer(server, shared_server.membership_folder, tmp_path_factory.mktemp("faults"))
    yield faulty
    faulty.close()
