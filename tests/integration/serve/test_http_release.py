"""Ranks of a real server leave and return over HTTP alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import requests
from shared_server import SharedServer

from flexfloor.membership.endpoint import Endpoint

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

DEADLINE_S = 120.0


class Curl:
    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"}

    def get(self, path: str) -> Any:
        return requests.get(f"{self._url}/{path}", timeout=DEADLINE_S).json()

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        answer = requests.post(
            f"{self._url}/flexfloor/{path}", json=body, headers=self._headers, timeout=DEADLINE_S
        )
        return answer.status_code, answer.json()


@pytest.fixture
def curl(shared_server: SharedServer, shared_server_url: str) -> Iterator[Curl]:
    curl = Curl(shared_server_url, Endpoint.read(shared_server.membership_folder).token)
    yield curl
    assert curl.post("rejoin", wait_s=60)[0] == 200


def ranks_with_load(curl: Curl) -> list[int]:
    return [load["dp_rank"] for load in curl.get("v1/loads?include=core")["loads"]]


def test_a_release_and_a_rejoin_of_real_ranks(curl: Curl) -> None:
    before = curl.get("flexfloor/membership")
    assert (before["members"], before["mode"], before["release"]) == ([0, 1, 2, 3], "elastic", "manual")
    code, answer = curl.post("release", ep_ranks=[1, 3], wait_s=60)
    assert (code, answer["status"]) == (200, "done")
    found = curl.get("flexfloor/membership")
    assert found["members"] == [0, 2]
    # One change or two: a rank that drains later leaves later.
    assert found["membership_epoch"] == answer["membership_epoch"] > before["membership_epoch"]
    assert found["last_switches"][-1]["num_bytes"] > 0
    assert ranks_with_load(curl) == [0, 2]
    code, answer = curl.post("release", ep_ranks=[0, 2])
    assert (code, answer["status"]) == (409, "refused")
    assert "the floor is 1" in answer["reason"]
    assert curl.post("rejoin", ep_ranks=[3], wait_s=60)[0] == 200
    assert ranks_with_load(curl) == [0, 2, 3]


def test_a_marked_rollout_of_a_real_server(curl: Curl) -> None:
    assert curl.post("rollout", action="begin", rollout_step=1)[0] == 200
    assert curl.post("release", ep_ranks=[1, 2, 3], wait_s=60)[0] == 200
    prompt = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True},
    }
    reply = requests.post(f"{curl._url}/generate", json=prompt, timeout=DEADLINE_S).json()
    assert len(reply["output_ids"]) == 40
    code, answer = curl.post("rollout", action="end", rollout_step=1)
    assert code == 200
    assert (answer["response_tokens"], answer["num_releases"]) == (40, 3)
    # One rank of four decoded; the prefill is an iteration that gives a token too.
    assert 40 <= answer["worker_iterations"] <= 44
    assert answer["static_worker_iterations"] == 4 * answer["worker_iterations"]
    assert answer["occupied_worker_s"] < answer["static_occupied_worker_s"]
    assert curl.get("flexfloor/membership")["members"] == [0, 1, 2, 3]
