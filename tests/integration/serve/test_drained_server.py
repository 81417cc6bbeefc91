"""A server that releases drained ranks itself, with an API key and metrics; drivers that know only HTTP."""

import importlib.util
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import requests
from server import Server, start_server
from shared_server import SharedServer

from flexfloor.membership.endpoint import Endpoint
from flexfloor.processes import ChildProcesses

pytestmark = [pytest.mark.integration, pytest.mark.late, pytest.mark.timeout(900)]

API_KEY = "sek"
DEADLINE_S = 120.0
FLAGS = (
    *("--flexfloor-membership", "elastic", "--flexfloor-collectives", "shm"),
    *("--flexfloor-release", "drained", "--api-key", API_KEY, "--enable-metrics"),
)


class Drained:
    """The server, as callers with different keys see it."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.url = server.url
        self.token = Endpoint.read(folder).token

    def get(self, path: str, key: str = API_KEY, **more: Any) -> requests.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        headers |= more.pop("headers", {})
        return requests.get(f"{self.url}/{path}", headers=headers, timeout=DEADLINE_S, **more)

    def post(self, path: str, key: str, **body: Any) -> requests.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return requests.post(f"{self.url}/{path}", json=body, headers=headers, timeout=DEADLINE_S)

    def membership(self) -> Any:
        return self.get("flexfloor/membership").json()

    def events(self, last_id: int) -> list[dict[str, Any]]:
        """All that there are so far, the newest of them a mark that was just made."""
        headers = {"Last-Event-ID": str(last_id)}
        found: list[dict[str, Any]] = []
        until = self.post("flexfloor/release", self.token, ep_ranks=[99]).json()["operation_id"]
        with self.get("flexfloor/events", headers=headers, stream=True) as stream:
            for line in stream.iter_lines():
                if line.startswith(b"data: "):
                    found.append(json.loads(line[6:]))
                    if found[-1].get("operation_id") == until:
                        return found[:-1]
        raise AssertionError("the stream ended")


@pytest.fixture(scope="module")
def drained(shared_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drained]:
    folder = tmp_path_factory.mktemp("drained")
    flags = [*FLAGS, "--flexfloor-folder", str(folder / "m")]
    with ChildProcesses() as children:
        server = start_server(children, shared_checkpoint, 4, folder / "server.log", flags)
        yield Drained(server.wait_ready(), folder / "m")


def wait_until(is_so: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    end_s = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < end_s
        threading.Event().wait(0.02)


def example() -> ModuleType:
    path = Path(__file__).parents[3] / "docs" / "examples" / "http_driver.py"
    spec = importlib.util.spec_from_file_location("http_driver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_key_reads_and_only_the_token_changes(drained: Drained) -> None:
    assert drained.get("flexfloor/membership", key="").status_code == 401
    assert drained.get("flexfloor/membership", key="wrong").status_code == 401
    assert drained.get("flexfloor/membership").status_code == 200
    assert drained.get("flexfloor/membership", key=drained.token).status_code == 200
    assert drained.post("flexfloor/rejoin", API_KEY).status_code == 401
    # Pending or done: the manager may be slower than the answer.
    assert drained.post("flexfloor/rejoin", drained.token).status_code in (200, 202)
    # SGLang's own routes stay as they were, also those that begin alike.
    assert drained.post("generate", drained.token, input_ids=[5]).status_code == 401
    assert drained.get("flexfloor", key="").status_code == 401
    assert drained.get("flexfloor/../server_info", key="").status_code == 401


def test_an_http_driver_gets_early_release_and_the_same_tokens(
    drained: Drained, shared_checkpoint: Path, shared_server: SharedServer, shared_server_url: str
) -> None:
    driver = example()
    arguments = ["--weights", str(shared_checkpoint), "--num-steps", "2", "--num-responses", "16"]
    oracle_engine = driver.Engine(url=shared_server_url)
    oracle_engine.update_weights(str(shared_checkpoint), "http-0")
    oracle = driver.main(["--url", shared_server_url, *arguments])
    last_id = max((event["id"] for event in drained.events(0)), default=0)
    answers = driver.main(["--url", drained.url, "--api-key", API_KEY, *arguments])
    pairs = [pair for steps in zip(oracle, answers, strict=True) for pair in zip(*steps, strict=True)]
    assert len(pairs) == 32
    # Float sums of another group may swap two tokens that are all but equally likely.
    assert sum(ours != theirs for theirs, ours in pairs) <= 1
    found = drained.events(last_id)
    parked = [event for event in found if event["type"] == "state" and event["to"] == "parked"]
    assert len(parked) >= 4, "ranks left in both rollouts"
    assert min(len(event["members"]) for event in found if event["type"] == "switch") == 1
    after = drained.membership()
    assert after["members"] == [0, 1, 2, 3]
    assert set(after["weight_versions"].values()) == {"http-2"}


def test_a_marked_rollout_tells_what_was_saved(drained: Drained) -> None:
    driver = example()
    engine = driver.Engine(url=drained.url, api_key=API_KEY)
    begun = drained.post("flexfloor/rollout", drained.token, action="begin", rollout_step=7)
    assert begun.status_code == 200, begun.text
    responses = driver.run_rollout(engine, 16, 256, seed=3)
    ended = drained.post("flexfloor/rollout", drained.token, action="end").json()
    assert ended["response_tokens"] == sum(map(len, responses))
    assert ended["num_releases"] >= 3
    assert ended["worker_iterations"] < 0.9 * ended["static_worker_iterations"]
    assert ended["occupied_worker_s"] < ended["static_occupied_worker_s"]
    assert drained.membership()["members"] == [0, 1, 2, 3]


def test_with_marks_nobody_leaves_between_steps(drained: Drained) -> None:
    engine = example().Engine(url=drained.url, api_key=API_KEY)
    epoch = drained.membership()["membership_epoch"]
    assert len(engine.generate([5, 6, 7], 200, seed=1)) == 200
    assert drained.membership()["membership_epoch"] == epoch


def test_loads_and_metrics_are_those_of_the_group(drained: Drained) -> None:
    assert drained.post("flexfloor/release", drained.token, ep_ranks=[2], wait_s=60).status_code == 200
    loads = drained.get("v1/loads", params={"include": "core"}).json()["loads"]
    assert [load["dp_rank"] for load in loads] == [0, 1, 3]
    assert drained.get("v1/loads", params={"dp_rank": 2}).json()["loads"] == []
    lines = dict(
        line.rsplit(" ", 1)
        for line in drained.get("metrics").text.splitlines()
        if line.startswith("flexfloor:")
    )
    assert float(lines["flexfloor:members"]) == 3.0
    assert float(lines["flexfloor:floor"]) == 1.0
    assert float(lines['flexfloor:ranks{state="parked"}']) == 1.0
    assert float(lines["flexfloor:membership_epoch"]) == drained.membership()["membership_epoch"]
    assert float(lines["flexfloor:switches_total"]) >= 1.0
    assert float(lines['flexfloor:operations_total{outcome="done"}']) >= 1.0
    assert float(lines["flexfloor:occupied_worker_seconds_total"]) < float(
        lines["flexfloor:static_worker_seconds_total"]
    )
    assert drained.post("flexfloor/rejoin", drained.token, wait_s=60).status_code == 200


def test_an_open_stream_does_not_keep_the_server_from_ending(drained: Drained) -> None:
    process = drained.server.process
    assert process is not None
    with drained.get("flexfloor/events", stream=True) as stream:
        assert next(stream.iter_lines()) == b": flexfloor"
        os.kill(process.pid, signal.SIGTERM)
        for _ in stream.iter_lines():
            pass
    wait_until(lambda: process.reap(timeout_s=0.1))
