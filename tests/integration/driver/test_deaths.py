"""Each process of a run dies, and the disk is full; what was finished is kept, the run ends up the same."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from job import END_DEADLINE_S, LEARNS, NUM_STEPS, START_DEADLINE_S, Job, resumed_job, running_job
from same_run import differences, lost_or_twice

from flexfloor.report.metrics import read_metrics
from flexfloor.rollout.ledger import read_ledger, step_path

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1500)]

DISK_BYTES = 64 * 1024 * 1024


def has_tokens(job: Job, step: int) -> bool:
    path = step_path(job.run_dir / "ledger", step)
    return path.exists() and read_ledger(path).state.num_tokens > 0


def is_syncing(job: Job, number: int) -> bool:
    log = (job.run_dir / "logs" / "server.log").read_text(errors="replace")
    return log.count("POST /begin_weight_update") >= number


def kill_one(job: Job, words: str) -> psutil.Process:
    """The topmost process below the driver with these words in its command line, and no launcher of it."""
    found = [item for item in job.descendants() if words in " ".join(item.cmdline())]
    victim = next(item for item in found if "torch.distributed.run" not in " ".join(item.cmdline()))
    victim.kill()
    return victim


def check_same(job: Job, finished: Job) -> None:
    assert differences(job.run_dir, finished.run_dir, NUM_STEPS) == []
    assert lost_or_twice(job.run_dir, NUM_STEPS) == (0, 0)


@pytest.mark.late
def test_a_server_that_dies_in_a_rollout_and_in_a_sync_is_replaced(finished: Job, tmp_path: Path) -> None:
    overrides = [*LEARNS, f"num_steps={NUM_STEPS}", "rollout.stream_interval_tokens=2"]
    with running_job(tmp_path / "servers", overrides) as job:
        job.wait_until(lambda: has_tokens(job, 1))
        kill_one(job, "sglang_patches.serve")
        job.wait_until(lambda: "starting it anew (1 of 2)" in job.text)
        # At the start, after step 0, into the second server, and after step 1.
        job.wait_until(lambda: is_syncing(job, 4))
        kill_one(job, "sglang_patches.serve")
        assert job.wait(2 * START_DEADLINE_S) == 0, job.text
    assert job.text.count("starting it anew") == 2
    assert "step 2: goes on from its record under the same weights" in job.text
    check_same(job, finished)


@pytest.mark.late
def test_a_rank_that_dies_in_a_rollout_costs_a_server_and_no_response(finished: Job, tmp_path: Path) -> None:
    """The others go on to the end of the step; then there is a whole server again."""
    overrides = [*LEARNS, f"num_steps={NUM_STEPS}", "rollout.stream_interval_tokens=2"]
    with running_job(tmp_path / "rank", overrides) as job:
        job.wait_until(lambda: has_tokens(job, 1))
        kill_one(job, "sglang::scheduler")
        assert job.wait(2 * START_DEADLINE_S) == 0, job.text
    lost = [record["rollout/num_lost_ranks"] for record in read_metrics(job.run_dir)]
    assert lost == [0, 1, 0, 0, 0]
    assert "the server has ended" not in job.text
    check_same(job, finished)


def test_a_training_rank_that_dies_ends_the_run_which_says_how_to_go_on(
    finished: Job, attached: list[str], tmp_path: Path
) -> None:
    overrides = [*LEARNS, *attached, f"num_steps={NUM_STEPS}", "trainer.checkpoint_every_steps=2"]
    with running_job(tmp_path / "trainer", overrides) as job:
        job.wait_until(lambda: job.num_steps() == 3)
        kill_one(job, "flexfloor.training.trainer --spec")
        # torchrun gives the other ranks time to end.
        assert job.wait(END_DEADLINE_S + 60) == 1
    assert f"Go on with: flexfloor-train resume={job.run_dir}" in job.text
    assert "trainer (pid" in job.text
    with resumed_job(tmp_path / "trainer") as job:
        assert job.wait(START_DEADLINE_S) == 0, job.text
    assert "step-000002, 2 steps done" in job.text
    check_same(job, finished)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A job's folder, whose run directory is a file system of its own."""
    run_dir = tmp_path / "small" / "run"
    run_dir.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(run_dir)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"A FULL DISK IS NOT TESTED: mount said {made.stderr.strip()}")
    yield run_dir.parent
    subprocess.run(["umount", "-l", str(run_dir)], check=True)


def fill(folder: Path) -> Path:
    """A file that takes all the room there is."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096):
                pass
        except OSError:
            return ballast
    raise AssertionError("unreachable: a disk has an end")


def test_a_full_disk_ends_the_run_which_goes_on_when_there_is_room(
    finished: Job, attached: list[str], small_disk: Path
) -> None:
    overrides = [*LEARNS, *attached, f"num_steps={NUM_STEPS}", "rollout.stream_interval_tokens=2"]
    overrides += ["trainer.checkpoint_every_steps=2"]
    with running_job(small_disk, overrides) as job:
        job.wait_until(lambda: has_tokens(job, 2))
        ballast = fill(job.run_dir)
        assert job.wait(START_DEADLINE_S) == 1
        ballast.unlink()
    assert "No space left on device" in job.text or "disk is full" in job.text
    assert f"Go on with: flexfloor-train resume={job.run_dir}" in job.text
    assert job.num_steps() < NUM_STEPS
    with resumed_job(small_disk) as job:
        assert job.wait(START_DEADLINE_S) == 0, job.text
    check_same(job, finished)
