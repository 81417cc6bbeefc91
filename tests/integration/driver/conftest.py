"""One run to its end, which other tests look at from all sides, and compare theirs with."""

import pytest
from job import LEARNS, NUM_STEPS, START_DEADLINE_S, Job, running_job
from shared_server import SharedServer


@pytest.fixture(scope="package")
def attached(shared_server: SharedServer, shared_server_url: str) -> list[str]:
    """Overrides for a run on the shared server."""
    return [
        f"cluster.server_url={shared_server_url}",
        f"membership.folder={shared_server.membership_folder}",
    ]


@pytest.fixture(scope="package")
def finished(attached: list[str], tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run of five steps to its end with an elastic group whose released workers are used."""
    folder = tmp_path_factory.mktemp("train") / "finished"
    with running_job(folder, [*LEARNS, *attached, "release=logprobs", f"num_steps={NUM_STEPS}"]) as job:
        assert job.wait(START_DEADLINE_S + NUM_STEPS * 30) == 0, job.text
    return job
