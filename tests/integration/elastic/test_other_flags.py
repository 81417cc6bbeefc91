"""The same on a server with everything else set: gloo, no overlap, chunked prefill, a KV pool that is too
small, reserved expert slots, and ranks that give back all of their memory."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rollouts import assert_same, make_requests, run_elastic, run_static
from server import Server, start_server
from soak import soak

from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint
from flexfloor.processes import ChildProcesses

# `full`: it needs servers of its own.
pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.late, pytest.mark.timeout(900)]

START_DEADLINE_S = 600.0
FLAGS = ["--flexfloor-membership", "elastic", "--flexfloor-floor", "2"]
# Each rank stops now and then, in its loop, in a preparation or in the middle of a switch.
FLAGS += ["--flexfloor-delays", "0.003,0.2,0.5,1"]
FLAGS += ["--flexfloor-expert-slots", "reserved", "--flexfloor-park-frees", "experts,kv,dense"]
FLAGS += ["--flexfloor-member-sets", "1,2;0,2,3"]
FLAGS += ["--disable-overlap-schedule", "--chunked-prefill-size", "8", "--max-total-tokens", "96"]


@pytest.fixture(scope="module")
def small(shared_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("small")
    with ChildProcesses() as children:
        flags = [*FLAGS, "--flexfloor-folder", str(folder / "membership")]
        # SGLang's own switch: retract every third batch, whether or not the pool is full.
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("SGLANG_TEST_RETRACT", "1")
            server = start_server(children, shared_checkpoint, 4, folder / "server.log", flags)
        yield server.wait_ready(START_DEADLINE_S), folder / "membership"


@pytest.fixture
def client(small: tuple[Server, Path]) -> Iterator[DriverClient]:
    with DriverClient(Endpoint.read(small[1]), timeout_s=60.0) as client:
        yield client
        assert client.rejoin().ok
        assert client.status().failed is None


def test_tokens_stay_with_retractions_and_chunks(small: tuple[Server, Path], client: DriverClient) -> None:
    order = (0, 3, 1, 2)
    server = small[0]
    rows: list[list[int]] = [[] for _ in order]
    for place, rank in enumerate(order):
        # Four of the longest do not fit into 96 tokens of KV together, so some queue.
        rows[rank] = [10 + 6 * place] * 4
    requests = make_requests(rows, seed=11)
    oracle = run_static(server, requests)
    answers, results = run_elastic(server, client, requests, floor=2)
    assert_same(oracle, answers)
    assert all(result.ok for result in results), results
    # Retractions decide who ends first.
    assert len(client.status().members) == 2
    assert client.rejoin().ok
    assert sum(answer.num_retractions for answer in answers) > 0


def test_a_rank_that_gave_back_everything_serves_again(
    small: tuple[Server, Path], client: DriverClient
) -> None:
    server = small[0]
    requests = make_requests([[12, 9], [12, 9], [12, 9], [12, 9]], seed=13)
    oracle = run_static(server, requests)
    rank = psutil.Process(server.counters()[3]["pid"])
    for _ in range(3):
        assert client.release([2, 3]).ok
        assert rank.is_running()
        assert client.rejoin().ok
        assert_same(oracle, run_static(server, requests))


def test_random_rollouts_with_delays(small: tuple[Server, Path], client: DriverClient) -> None:
    result = soak(small[0], client, num_rollouts=2, seed=2, max_tokens=24)
    assert (result.num_hangs, result.num_identical) == (0, 2), result.mismatches


def test_the_floor_of_the_reserved_slots_holds(small: tuple[Server, Path], client: DriverClient) -> None:
    assert client.release([0, 1]).ok
    refused = client.release([2])
    assert not refused.ok
    assert "floor" in refused.reason


def test_a_rank_may_end_for_good(small: tuple[Server, Path], client: DriverClient) -> None:
    """The last test of this server: nothing brings that rank back."""
    server = small[0]
    requests = make_requests([[12, 9], [12, 9], [12, 9], []], seed=18)
    oracle = run_static(server, requests)
    rank = psutil.Process(server.counters()[3]["pid"])
    assert client.release([3], leave="exit").ok
    gone, _ = psutil.wait_procs([rank], timeout=30.0)
    assert gone == [rank]
    assert_same(oracle, run_static(server, requests))
    refused = client.rejoin([3])
    assert not refused.ok
    assert "exited" in refused.reason
    # Experts of a rank that is gone could not be updated where they are now.
    update = server.raw_post("update_weights_from_disk", model_path="anywhere")
    assert update.status_code != 200
    assert "left for good" in update.text
    assert_same(oracle, run_static(server, requests))
    assert client.status().members == (0, 1, 2)
