"""A client of the shared server's membership manager, and the group whole again after every test."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "sglang"))

from server import Server
from shared_server import SharedServer

from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint

DEADLINE_S = 60.0


@pytest.fixture(scope="session")
def loaded_server(shared_server_url: str, shared_checkpoint: Path) -> Server:
    """With weights that are sure of something, whatever tests before this room have left in it."""
    server = Server(url=shared_server_url, num_ranks=4)
    server.post("update_weights_from_disk", model_path=str(shared_checkpoint), weight_version="7000")
    return server


@pytest.fixture
def server(loaded_server: Server) -> Server:
    return loaded_server


@pytest.fixture
def client(shared_server: SharedServer, shared_server_url: str) -> Iterator[DriverClient]:
    with DriverClient(Endpoint.read(shared_server.membership_folder), timeout_s=DEADLINE_S) as client:
        yield client
        assert client.rejoin().ok
        status = client.status()
        assert status.members == status.routed == (0, 1, 2, 3)
        assert status.failed is None
