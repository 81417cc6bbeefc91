"""A server over two nodes: two launchers on this host that know each other by tcp only."""

import os
import random
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from rollouts import assert_same, make_requests, run_elastic, run_static
from server import Server, server_flags

from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint
from flexfloor.processes import ChildProcess, ChildProcesses

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

START_DEADLINE_S = 600.0
DEADLINE_S = 120.0
NODES = ("alpha", "beta")
"""What SLURM would call them; the ranks of each are half of the group."""
LENGTHS = [[40, 21], [60, 12], [12, 5], [8, 16]]
"""Node beta runs out of work long before node alpha."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoNodes:
    server: Server
    other: ChildProcess
    """The launcher of node beta."""
    folder: Path


@pytest.fixture(scope="module")
def two(shared_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    folder = tmp_path_factory.mktemp("nodes")
    first = free_ports(40)
    common = ["--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{first}"]
    common += ["--flexfloor-membership", "elastic", "--flexfloor-folder", str(folder / "m")]
    common += ["--flexfloor-bind", f"tcp://localhost:{first + 20}", "--host", "127.0.0.1"]
    with ChildProcesses() as children:
        launchers = []
        # The second node is there first, and waits for the first one's keys.
        for node_rank in (1, 0):
            argv = [
                sys.executable,
                "-m",
                "sglang_patches.serve",
                *server_flags(shared_checkpoint, 4),
                *common,
            ]
            argv += ["--node-rank", str(node_rank), "--port", str(first + 30 + node_rank)]
            environment = {**os.environ, "SLURMD_NODENAME": NODES[node_rank]}
            log_path = folder / f"{NODES[node_rank]}.log"
            launchers.append(children.start(NODES[node_rank], argv, env=environment, log_path=log_path))
        server = Server(url=f"http://127.0.0.1:{first + 30}", num_ranks=4, process=launchers[1])
        yield TwoNodes(server=server.wait_ready(START_DEADLINE_S), other=launchers[0], folder=folder / "m")


def free_ports(count: int) -> int:
    """The first of so many ports in a row that are free now, below those that the kernel hands out."""
    for _ in range(100):
        first = random.randrange(10_000, 32_000 - count)
        if all(is_free(port) for port in range(first, first + count)):
            return first
    raise AssertionError("no free ports")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def client(two: TwoNodes) -> Iterator[DriverClient]:
    with DriverClient(Endpoint.read(two.folder), timeout_s=DEADLINE_S) as client:
        yield client


def test_a_node_parks_and_returns_and_the_tokens_are_those_of_one_node(
    two: TwoNodes, client: DriverClient, loaded_server: Server
) -> None:
    status = client.status()
    assert status.nodes == {0: "alpha", 1: "alpha", 2: "beta", 3: "beta"}
    assert Endpoint.read(two.folder).is_tcp
    requests = make_requests(LENGTHS, seed=11)
    oracle = run_static(loaded_server, requests)
    assert_same(oracle, run_static(two.server, requests))
    for _ in range(2):
        answers, results = run_elastic(two.server, client, requests, may_leave=lambda rank: rank >= 2)
        assert_same(oracle, answers)
        assert all(result.ok for result in results), results
        assert client.status().members == (0, 1)
        assert two.other.is_alive()
        assert client.rejoin().ok
        assert_same(oracle, run_static(two.server, requests))
    # Node alpha serves nothing, and still has the manager, the store and rank 0's process.
    assert client.release([0, 1]).ok
    assert client.status().members == (2, 3)
    unbound = make_requests([[], [], [20, 9], [14, 7]], seed=12)
    assert_same(run_static(loaded_server, unbound), run_static(two.server, unbound))
    assert client.rejoin().ok


def test_a_node_that_exits_ends_in_order_and_the_rest_goes_on(
    two: TwoNodes, client: DriverClient, loaded_server: Server
) -> None:
    requests = make_requests([[90], [90], [], []], seed=13)
    oracle = run_static(loaded_server, requests)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_static, two.server, requests)
        result = client.release([2, 3], "exit")
        assert result.ok, result
        assert_same(oracle, running.result(DEADLINE_S))
    assert two.other.reap(DEADLINE_S)
    assert two.other.exit_code == 0
    assert client.status().states == {0: "serving", 1: "serving", 2: "exited", 3: "exited"}
    assert_same(oracle, run_static(two.server, requests))
    # The rest is still elastic: its groups come from the store on node alpha.
    assert client.release([0]).ok
    assert client.status().members == (1,)
    assert client.rejoin().ok
    assert_same(oracle, run_static(two.server, requests))
