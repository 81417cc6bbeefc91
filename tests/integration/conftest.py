"""Servers for the rooms that need a server but not a fresh one.

A start is a minute of imports in many processes, so they start with the first integration test, and the tests
that need them run last, after the unit tests as well.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_server import SharedServer, SmallServers
from sharp_model import sharp_tiny_moe

from flexfloor.processes import ChildProcesses

LATE = ("servers", "shared_server_url", "both", "dying_server")
"""Fixtures that need the shared server, in the order in which their tests run: the first ones want its first
weights, the last ones kill its ranks."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        if item.get_closest_marker("late"):
            return 1
        needed = [LATE.index(name) + 2 for name in item_names(item) if name in LATE]
        return max(needed, default=0) if "dying_server" in item_names(item) else min(needed, default=0)

    items.sort(key=place)


def item_names(item: pytest.Item) -> tuple[str, ...]:
    """The fixtures of a test."""
    return tuple(getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def shared_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of a model that is sure of something."""
    return sharp_tiny_moe(tmp_path_factory.mktemp("shared") / "model")


@pytest.fixture(scope="session")
def shared_server(
    shared_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServer]:
    """A server that is starting, with the command line that a run uses. Tests may leave any weights in it."""
    with ChildProcesses() as children:
        yield SharedServer(children, shared_checkpoint, tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="session")
def small_servers(
    shared_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SmallServers]:
    """Two more servers of the same checkpoint that are starting: one rank, and two ranks over gloo."""
    with ChildProcesses() as children:
        yield SmallServers(children, shared_checkpoint, tmp_path_factory.mktemp("servers"))


@pytest.fixture(scope="session", autouse=True)
def early_start(request: pytest.FixtureRequest) -> None:
    needed = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    if "servers" in needed:
        request.getfixturevalue("small_servers")
    if needed & set(LATE):
        request.getfixturevalue("shared_server")


@pytest.fixture(scope="session")
def shared_server_url(shared_server: SharedServer) -> str:
    """URL of the shared server, which is ready."""
    return shared_server.wait_ready()
