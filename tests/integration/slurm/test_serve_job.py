"""A server as a SLURM job over two nodes, driven from outside the job."""

import sys
from pathlib import Path

import pytest
from cluster import SlurmCluster, wait_until
from conftest import ROOT, Submit
from two_length_model import write_model

from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint

sys.path.append(str(ROOT / "tests/integration/sglang"))
from server import Server, server_flags

pytestmark = [pytest.mark.integration, pytest.mark.late, pytest.mark.timeout(1800)]

START_DEADLINE_S = 900.0
DEADLINE_S = 120.0


@pytest.mark.full
def test_a_server_over_two_nodes_serves_releases_and_ends_with_its_job(
    cluster: SlurmCluster, submit: Submit, tmp_path: Path
) -> None:
    flags = server_flags(write_model(tmp_path / "model", context_tokens=512), 2)
    job = submit("serve.sbatch", *flags, "--flexfloor-membership", "elastic", options=["--nodes=2"])
    url = tmp_path / "run/url"
    wait_until(url.exists, job.story, DEADLINE_S)
    server = Server(url=url.read_text().strip(), num_ranks=2)
    wait_until(lambda: server.is_ready() or job.state != "RUNNING", job.story, START_DEADLINE_S)
    assert job.state == "RUNNING", job.story()
    with DriverClient(Endpoint.read(tmp_path / "run/membership"), timeout_s=DEADLINE_S) as client:
        nodes = job.field("NodeList")
        assert cluster.run("scontrol", "show", "hostnames", nodes).split() == list(
            client.status().nodes.values()
        )
        assert client.release([1]).ok
        assert list(client.status().members) == [0]
        assert (
            len(server.generate(input_ids=[5, 6], sampling_params={"max_new_tokens": 4})["output_ids"]) == 4
        )
        assert client.rejoin().ok
        assert list(client.status().members) == [0, 1]
    job.cancel()
    assert job.wait(DEADLINE_S) == "CANCELLED", job.story()
    wait_until(lambda: set(cluster.node_states().values()) == {"idle"}, job.story, DEADLINE_S)


def test_a_flag_that_cannot_work_ends_the_job_with_its_reason(submit: Submit, tmp_path: Path) -> None:
    job = submit("serve.sbatch", "--model-path", "m", "--flexfloor-collectives", "smoke signals")
    assert job.wait(DEADLINE_S) == "FAILED", job.story()
    assert job.exit_code == 1
    assert (
        "--flexfloor-collectives=smoke signals: unknown" in (tmp_path / "run/logs/server-0.log").read_text()
    )
