"""A cluster of four nodes for the tests of the batch scripts; skipped, loudly, where there is no SLURM."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from cluster import INSTALL, SlurmCluster, SlurmJob, missing_programs, running_cluster

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "tests/integration/driver"))

Submit = Callable[..., SlurmJob]


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    missing = missing_programs()
    if missing:
        pytest.skip(f"SLURM IS NOT TESTED: no {', '.join(missing)} here. To test it: {INSTALL}")
    with running_cluster() as running:
        yield running


@pytest.fixture
def submit(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Submit]:
    """Queue one of `scripts/` with the environment of this test run; jobs that are left are cancelled."""
    jobs: list[SlurmJob] = []

    def submit_script(
        name: str, *arguments: str, options: Sequence[str] = (), variables: dict[str, str] | None = None
    ) -> SlurmJob:
        env = {
            "FLEXFLOOR_HOME": str(ROOT),
            # The environment that runs this test, whatever its path.
            "FLEXFLOOR_ENV": sys.prefix,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/integration/driver'}",
            "RUN_DIR": str(tmp_path / "run"),
            **(variables or {}),
        }
        exported = ",".join(["ALL", *(f"{name}={value}" for name, value in env.items())])
        job = cluster.submit(
            ROOT / "scripts" / name,
            *arguments,
            options=[f"--export={exported}", *options],
            cwd=tmp_path,
        )
        jobs.append(job)
        return job

    yield submit_script
    for job in jobs:
        job.cancel()
    for job in jobs:
        job.wait(60.0)
