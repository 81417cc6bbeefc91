"""The main job for real: own server and trainer, and runs attached to a shared server."""

import signal
import time
from pathlib import Path

import psutil
import pytest
from job import END_DEADLINE_S, LEARNS, NUM_STEPS, SMALL, STEP_DEADLINE_S, Job, running_job
from transformers import AutoConfig, AutoTokenizer

from flexfloor.driver.stopping import STOPPED
from flexfloor.report.metrics import read_metrics
from flexfloor.rollout.iteration_log import iterations_path, load_iterations
from flexfloor.rollout.ledger import read_ledger, step_path
from flexfloor.schedule_record import read_schedules
from flexfloor.scheduling.history import LengthHistory
from flexfloor.types import Response

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

RESPONSES_PER_STEP = 15
DIES_WITH_A_RANK = ["membership=static"]


def responses(run_dir: Path, step: int) -> tuple[Response, ...]:
    contents = read_ledger(step_path(run_dir / "ledger", step))
    assert contents.torn_bytes == 0
    return contents.state.finished_responses()


def wait_gone(processes: list[psutil.Process]) -> None:
    """Ended, whether or not whoever inherited them has taken notice."""
    deadline_s = time.monotonic() + END_DEADLINE_S
    while alive := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < deadline_s, alive
        time.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def checksums(job: Job) -> list[str]:
    lines = (job.run_dir / "train.log").read_text().splitlines()
    return [line.split("checksum=")[1].split()[0] for line in lines if "checksum=" in line]


def drawn(run_dir: Path, step: int) -> list[tuple[str, tuple[int, ...]]]:
    """In the order of submission, whichever rank ended a response."""
    return [(item.response_id, item.token_ids) for item in responses(run_dir, step)]


@pytest.mark.late
@pytest.mark.full
def test_a_dead_rank_ends_the_run_with_its_story_and_nothing_is_left_running(tmp_path: Path) -> None:
    with running_job(
        tmp_path / "own", [*SMALL, "num_steps=1000", "cluster.max_server_restarts=0", *DIES_WITH_A_RANK]
    ) as job:
        job.wait_for_steps(2)
        children = job.descendants()
        victim = next(item for item in children if "sglang::scheduler" in " ".join(item.cmdline()))
        victim.kill()
        # SGLang itself takes 5 s to notice and to end; the limit counts from there.
        assert job.wait(END_DEADLINE_S + 20) == 1
        wait_gone(children)
    assert "server (pid" in job.text
    assert f"flexfloor-train resume={job.run_dir}" in job.text
    assert "Last lines of" in job.text
    records = read_metrics(job.run_dir)
    assert len(records) >= 2
    assert len(responses(job.run_dir, 0)) == RESPONSES_PER_STEP
    for step, record in enumerate(records[:2]):
        iterations = load_iterations(iterations_path(job.run_dir, step))
        assert iterations.worker_iterations == record["occupancy/worker_iterations"]
        assert iterations.idle_worker_iterations == record["occupancy/idle_worker_iterations"]


def test_every_response_is_there_once_with_its_weights(finished: Job) -> None:
    records = read_metrics(finished.run_dir)
    assert [record["rollout_step"] for record in records] == list(range(NUM_STEPS))
    for step, record in enumerate(records):
        # 16 prompts: one batch of a pass holds a single one, the fourth where nothing is known of lengths.
        sizes = {3} if step == 3 else {RESPONSES_PER_STEP} if step < 3 else {3, RESPONSES_PER_STEP}
        ended = responses(finished.run_dir, step)
        assert len({item.response_id for item in ended}) == len(ended)
        assert len(ended) in sizes
        assert {item.weight_version for item in ended} == {step}
        assert record["occupancy/num_tokens"] == sum(item.num_tokens for item in ended)
        assert record["occupancy/worker_iterations"] > 0
        assert 0.0 <= record["occupancy/tail_idle_share"] < 1.0
        assert record["train/mean_abs_logprob_diff"] < 1e-4


def test_every_step_is_planned_predicted_and_on_record(finished: Job) -> None:
    schedules, records = read_schedules(finished.run_dir), read_metrics(finished.run_dir)
    assert [schedule.rollout_step for schedule in schedules] == list(range(NUM_STEPS))
    for schedule, record in zip(schedules, records, strict=True):
        assert schedule.placement == "balanced"
        assert record["schedule/num_decisions"] == len(schedule.decisions)
        assert record["schedule/num_moves"] <= sum(len(one.moves) for one in schedule.decisions)
        assert {"mean_abs_log_error", "coverage_p90"} <= schedule.calibration.keys()
        assert (finished.run_dir / "timelines" / f"step-{schedule.rollout_step:06d}.svg").exists()
    # The first pass is cold; every prompt of the second one has been seen.
    assert [record["prediction/share_seen"] for record in records] == [0.0] * 4 + [1.0]
    prompts = [{item.prompt_id for item in responses(finished.run_dir, step)} for step in range(4)]
    assert sum(len(part) for part in prompts) == len(set.union(*prompts)) == 16
    with LengthHistory.open(finished.run_dir / "lengths.sqlite", must_exist=True) as history:
        (counts,) = history.counts()
    assert counts.num_responses == sum(record["rollout/num_responses"] for record in records)


def test_ranks_leave_and_count_for_less(finished: Job) -> None:
    records = read_metrics(finished.run_dir)

    def total(name: str) -> float:
        return sum(record[name] for record in records)

    # Not in every step: all ranks may end at once.
    assert total("membership/num_released") > 0
    assert total("occupancy/worker_iterations") < total("occupancy/static_worker_iterations")
    assert total("occupancy/occupied_worker_s") < total("occupancy/static_occupied_worker_s")
    assert "a static group" in finished.text


def test_logprobs_were_computed_while_workers_were_away_and_not_again(finished: Job) -> None:
    records = read_metrics(finished.run_dir)
    # Some step may end before a group is complete and a worker away.
    assert sum(record["logprobs/num_early_groups"] for record in records) > 0
    for record in records:
        assert record["train/logprob_s"] == 0.0
        assert record["train/kl"] > 0
        # With a reference model every group needs logprobs.
        assert record["logprobs/num_groups"] * 3 == record["rollout/num_responses"]
        early = record["logprobs/num_early_groups"] > 0
        assert (record["logprobs/saved_s"] > 0) is early
        assert (record["logprobs/early_token_share"] > 0) is early
    assert "logprob seconds in the rollout" in finished.text


def test_the_weights_change_in_every_step(finished: Job) -> None:
    assert len(set(checksums(finished))) == NUM_STEPS + 1


def test_the_run_leaves_a_model_that_transformers_reads(finished: Job) -> None:
    folder = finished.run_dir / "hf"
    assert AutoConfig.from_pretrained(folder).num_experts == 8
    assert AutoTokenizer.from_pretrained(folder).decode([4, 5]) != ""
    assert (folder / "model.safetensors").stat().st_size > 100_000


def test_the_screen_shows_a_line_a_step_and_the_table(finished: Job) -> None:
    assert [line.split()[1] for line in finished.text.splitlines() if line.startswith("step ")] == [
        f"{step}/{NUM_STEPS}" for step in range(1, NUM_STEPS + 1)
    ]
    assert "tail idle, share of worker time" in finished.text


def test_a_run_that_is_told_to_stop_saves_what_it_has(attached: list[str], tmp_path: Path) -> None:
    with running_job(tmp_path / "stopped", [*SMALL, *attached, "num_steps=1000"]) as job:
        job.wait_for_steps(2)
        children = job.descendants()
        job.process.send_signal(signal.SIGUSR1)
        assert job.wait(STEP_DEADLINE_S) == STOPPED, job.text
        wait_gone(children)
    num_steps = job.num_steps()
    assert 2 <= num_steps < 1000
    assert f"asked to end after {num_steps} of 1000 steps; saving" in job.text
    assert [path.name for path in (job.run_dir / "checkpoints").iterdir()] == [f"step-{num_steps:06d}"]
    assert AutoConfig.from_pretrained(job.run_dir / "hf").num_experts == 8
    for step in range(num_steps):
        assert len(responses(job.run_dir, step)) in (3, RESPONSES_PER_STEP)


def test_a_static_group_draws_the_same_and_ctrl_c_ends_all_in_time(
    finished: Job, shared_server_url: str, tmp_path: Path
) -> None:
    attach = f"cluster.server_url={shared_server_url}"
    """Its training computes old and reference logprobs itself, and comes to the same."""
    with running_job(tmp_path / "again", [*LEARNS, attach, "membership=static", "num_steps=1000"]) as job:
        job.wait_for_steps(NUM_STEPS)
        children = job.descendants()
        assert children
        job.process.send_signal(signal.SIGINT)
        assert job.wait(END_DEADLINE_S) == 130
        wait_gone(children)
    for step in range(NUM_STEPS):
        assert drawn(job.run_dir, step) == drawn(finished.run_dir, step)
    first, second = (read_metrics(item.run_dir)[:NUM_STEPS] for item in (finished, job))
    for name in ("reward/mean", "train/loss", "train/grad_norm", "train/entropy", "train/kl"):
        assert [record[name] for record in second] == pytest.approx(
            [record[name] for record in first], abs=1e-4
        )
    assert all(record["train/logprob_s"] > 0 for record in second)
