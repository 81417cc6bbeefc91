"""A driver is killed with -9, a record torn, a checkpoint damaged; the run goes on as if nothing had been."""

from pathlib import Path

import pytest
from job import LEARNS, NUM_STEPS, START_DEADLINE_S, Job, resumed_job, running_job
from same_run import differences, lost_or_twice

from flexfloor.rollout.ledger import read_ledger, step_path

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

KILLED_IN = 2
"""In mid-step of this one; there are checkpoints of one and of two steps by then."""


def begun(job: Job, step: int) -> bool:
    """The step has responses on record, and not all of them."""
    path = step_path(job.run_dir / "ledger", step)
    if not path.exists():
        return False
    state = read_ledger(path).state
    return state.opened is not None and state.num_tokens > 0


def test_a_killed_run_goes_on_to_what_it_would_have_been(
    finished: Job, attached: list[str], tmp_path: Path
) -> None:
    overrides = [*LEARNS, *attached, f"num_steps={NUM_STEPS}", "trainer.checkpoint_every_steps=1"]
    # Tokens reach the record often, so that there are some when the driver is killed.
    overrides += ["rollout.stream_interval_tokens=2"]
    with running_job(tmp_path / "killed", overrides) as job:
        job.wait_until(lambda: begun(job, KILLED_IN))
        job.kill()
    assert job.num_steps() == KILLED_IN
    ledger = step_path(job.run_dir / "ledger", KILLED_IN)
    # As a power cut leaves it: the last record half written.
    with ledger.open("ab") as file:
        file.write(b"\x40\x00\x00")
    before = read_ledger(ledger).state
    assert before.num_finished < 15
    checkpoints = sorted(path.name for path in (job.run_dir / "checkpoints").iterdir())
    assert checkpoints == ["step-000001", "step-000002"]
    damaged = next((job.run_dir / "checkpoints" / "step-000002").glob("*.distcp"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with resumed_job(tmp_path / "killed") as job:
        assert job.wait(START_DEADLINE_S) == 0, job.text
    assert f"DAMAGED CHECKPOINT, passed over for the one before it: {damaged.parent}" in job.text
    assert "step-000001, 1 steps done, weight_version 1" in job.text
    # Drawn before the kill by the weights that the replay has come to again, bit for bit.
    story = "goes on from its record under the same weights"
    assert f"step 2: {story}: 15 of 15 responses" in job.text
    assert f"step 3: {story}: {before.num_finished} of 15 responses were finished" in job.text
    assert differences(job.run_dir, finished.run_dir, NUM_STEPS) == []
    assert lost_or_twice(job.run_dir, NUM_STEPS) == (0, 0)
