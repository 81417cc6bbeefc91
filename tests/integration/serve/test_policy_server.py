"""A server that releases ranks by its cost-based policy, with SGLang's admin key."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server import start_server
from test_drained_server import API_KEY, Drained, example

from flexfloor.processes import ChildProcesses

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

ADMIN_KEY = "adm"
FLAGS = (
    *("--flexfloor-membership", "elastic", "--flexfloor-collectives", "shm", "--flexfloor-release", "policy"),
    *("--api-key", API_KEY, "--admin-api-key", ADMIN_KEY),
)


@pytest.fixture(scope="module")
def served(shared_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drained]:
    folder = tmp_path_factory.mktemp("policy")
    flags = [*FLAGS, "--flexfloor-folder", str(folder / "m")]
    with ChildProcesses() as children:
        server = start_server(children, shared_checkpoint, 4, folder / "server.log", flags)
        yield Drained(server.wait_ready(), folder / "m")


def test_where_there_is_an_admin_key_only_it_changes(served: Drained) -> None:
    assert served.get("flexfloor/membership").status_code == 200
    assert served.post("flexfloor/rejoin", API_KEY).status_code == 401
    assert served.post("flexfloor/rejoin", served.token).status_code == 401
    assert served.post("flexfloor/rejoin", ADMIN_KEY, wait_s=60).status_code == 200


def test_the_policy_lets_ranks_go_while_the_tail_runs(served: Drained) -> None:
    driver = example()
    engine = driver.Engine(url=served.url, api_key=API_KEY)
    begun = served.post("flexfloor/rollout", ADMIN_KEY, action="begin", rollout_step=1)
    assert begun.status_code == 200, begun.text
    responses = driver.run_rollout(engine, 16, 768, seed=5)
    ended = served.post("flexfloor/rollout", ADMIN_KEY, action="end").json()
    assert ended["response_tokens"] == sum(map(len, responses))
    assert ended["num_releases"] >= 1
    assert ended["worker_iterations"] < ended["static_worker_iterations"]
    assert served.membership()["members"] == [0, 1, 2, 3]
