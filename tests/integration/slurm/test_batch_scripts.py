"""The batch scripts on a real SLURM, as far as no server has to start."""

import signal
from pathlib import Path

import pytest
from cluster import SlurmCluster, wait_until
from conftest import Submit
from job import SMALL

from flexfloor.driver.stopping import STOPPED

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

START_DEADLINE_S = 600.0
REFUSED = 2


def test_a_job_of_another_size_than_its_overrides_is_refused(submit: Submit, cluster: SlurmCluster) -> None:
    job = submit("train.sbatch", "experiment=quickstart", "trainer.num_ranks=999", options=["--nodes=2"])
    assert job.wait(START_DEADLINE_S) == "FAILED", job.story()
    assert job.exit_code == REFUSED
    assert "error: trainer.num_ranks=999: " in job.text
    # Before any step of it has started.
    assert "server" not in cluster.run("squeue", "--steps", "--noheader")


def test_the_tasks_of_an_array_are_the_jobs_of_the_sweep(submit: Submit, cluster: SlurmCluster) -> None:
    sweep = ["experiment=quickstart", "rollout.top_p=0.5,0.6", "seed=3,4"]
    jobs = [submit("sweep.sbatch", *sweep, options=[f"--array={number}"]) for number in (0, 3, 4)]
    states = [job.wait(START_DEADLINE_S) for job in jobs]
    assert states == ["FAILED"] * 3
    texts = [job.output.with_name(f"slurm-{job.job_id}.out") for job in jobs]
    shown = [path.read_text() for path in texts]
    assert "task 0: experiment=quickstart rollout.top_p=0.5 seed=3" in shown[0]
    assert "error: rollout.top_p=0.5: only 1.0" in shown[0]
    assert "task 3: experiment=quickstart rollout.top_p=0.6 seed=4" in shown[1]
    assert "error: rollout.top_p=0.6: only 1.0" in shown[1]
    assert "error: job 4: the sweep has 4 jobs. Fix: submit with --array=0-3" in shown[2]


@pytest.mark.parametrize(
    ("variables", "overrides", "reason"),
    [
        ({"SERVER_NODES": "3"}, (), "SERVER_NODES=3: the job has 2 nodes"),
        ({"SERVER_NODES": "2"}, ("release=slurm",), "release=slurm gives back nodes that the trainer needs"),
    ],
)
def test_nodes_that_do_not_fit_are_refused(
    submit: Submit, variables: dict[str, str], overrides: tuple[str, ...], reason: str
) -> None:
    job = submit(
        "train.sbatch", "experiment=quickstart", *overrides, options=["--nodes=2"], variables=variables
    )
    assert job.wait(START_DEADLINE_S) == "FAILED", job.story()
    assert job.exit_code == REFUSED
    assert reason in job.text


def test_the_warning_before_the_time_limit_reaches_the_driver(submit: Submit, tmp_path: Path) -> None:
    """What `--signal=B:USR1@...` does, and here nothing is there to save yet."""
    model = f"model.path={tmp_path / 'models'}"
    job = submit("train.sbatch", *SMALL, model, "num_steps=1000", options=["--nodes=1"])
    log = job.output.parent / "run/logs/server.log"
    wait_until(log.exists, job.story, START_DEADLINE_S)
    job.signal_script(signal.SIGUSR1.name)
    assert job.wait(START_DEADLINE_S) == "FAILED", job.story()
    assert job.exit_code == STOPPED
    assert "asked to end before the first step; nothing to save" in job.text
