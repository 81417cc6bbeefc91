"""A run over four nodes of a real SLURM: server on two, trainer on two, one given back in the last step."""

import re
from pathlib import Path

import pytest
from cluster import SlurmCluster, SlurmJob, wait_until
from conftest import Submit
from two_length_model import model_overrides, write_model, write_prompts

from flexfloor.data.order import PromptOrder
from flexfloor.report.metrics import METRICS_FILE, read_metrics
from flexfloor.rollout.ledger import read_ledger, step_path
from flexfloor.types import FinishReason

# Servers of its own start late, because others share theirs.
pytestmark = [pytest.mark.integration, pytest.mark.late, pytest.mark.timeout(3000)]

START_DEADLINE_S = 900.0
TAIL_DEADLINE_S = 900.0
QUICKSTART_DEADLINE_S = 2400.0
CONTEXT_TOKENS = 4096
LONG_TOKENS = 1500
"""The tail lasts long enough for ranks to exit, their step to end and SLURM to start another job."""
NUM_PROMPTS, BATCH, LONG_PROMPT, SEED = 8, 4, 0, 9


def run_overrides(folder: Path) -> list[str]:
    model = write_model(folder / "model", context_tokens=CONTEXT_TOKENS)
    prompts = write_prompts(folder / "prompts.jsonl", num_prompts=NUM_PROMPTS, long_one=LONG_PROMPT)
    return [
        "experiment=quickstart",
        *model_overrides(model, context_tokens=CONTEXT_TOKENS),
        "data=jsonl",
        f"data.path={prompts}",
        "data.reward=probe_rewards:share_of_digits",
        f"seed={SEED}",
        "num_steps=2",
        "cluster.num_devices_per_node=2",
        f"cluster.server_start_timeout_s={START_DEADLINE_S}",
        f"cluster.trainer_start_timeout_s={START_DEADLINE_S}",
        "rollout.collectives=gloo",
        f"rollout.num_prompt_groups={BATCH}",
        "rollout.num_responses_per_prompt=2",
        f"rollout.max_response_tokens={LONG_TOKENS}",
        "algorithm.num_minibatches=1",
        # Ranks leave as they drain; nobody's responses move.
        "scheduling=verl",
        "release=slurm",
    ]


def num_steps_done(run_dir: Path) -> int:
    return len(read_metrics(run_dir)) if (run_dir / METRICS_FILE).exists() else 0


def second_job(cluster: SlurmCluster, folder: Path) -> SlurmJob:
    """It needs one node, and all four are taken."""
    script = folder / "second.sh"
    # It stays until it has been seen, a minute at most.
    script.write_text(
        f"#!/bin/bash\ndate +%s.%N\nfor _ in {{1..600}}; do [ -e {folder}/seen ] && exit 0; sleep 0.1; done\n"
    )
    return cluster.submit(script, options=["--nodes=1", "--exclusive", "--job-name=second"], cwd=folder)


def last_response_at_unix_s(run_dir: Path, step: int) -> float:
    state = read_ledger(step_path(run_dir / "ledger", step)).state
    assert state.opened is not None
    ended_s = max(response.finished_at_s for response in state.finished_responses())
    return ended_s - state.opened.at_s + state.opened.at_unix_s


def test_a_run_over_four_nodes_gives_one_back_while_its_tail_runs(
    cluster: SlurmCluster, submit: Submit, tmp_path: Path
) -> None:
    # The two long responses are the first of the last step, which round robin puts on ranks 0 and 1.
    assert PromptOrder(num_prompts=NUM_PROMPTS, seed=SEED).batch(1, BATCH)[0] == LONG_PROMPT
    run_dir = tmp_path / "run"
    first = submit(
        "train.sbatch", *run_overrides(tmp_path), options=["--nodes=4"], variables={"SERVER_NODES": "2"}
    )
    first.wait_running()
    second = second_job(cluster, tmp_path)
    wait_until(
        lambda: num_steps_done(run_dir) >= 1 or first.state != "RUNNING", first.story, START_DEADLINE_S
    )
    assert (first.state, second.state) == ("RUNNING", "PENDING"), first.story()
    before = cluster.queue()
    wait_until(lambda: second.state != "PENDING" or first.state != "RUNNING", first.story, TAIL_DEADLINE_S)
    during, steps_by_then = cluster.queue(), num_steps_done(run_dir)
    (tmp_path / "seen").touch()
    assert first.state == "RUNNING", first.story()
    assert steps_by_then == 1
    assert second.wait(60.0) == "COMPLETED"
    assert first.wait(TAIL_DEADLINE_S) == "COMPLETED", first.story()

    tail_ended_s, second_started_s = last_response_at_unix_s(run_dir, 1), float(second.text)
    story = (
        f"{before}\n\n{during}\n\n"
        f"second job started at {second_started_s:.3f} on {second.field('NodeList')}\n"
        f"last response ended at {tail_ended_s:.3f}, {tail_ended_s - second_started_s:.3f} s later\n"
    )
    (tmp_path / "release_slurm.txt").write_text(story)
    print(story)
    assert re.search(r"second +RUNNING +1 n2", during), story
    assert second_started_s < tail_ended_s, story
    assert second.field("NodeList") == "n2", story
    assert re.search(r"n\[1,3-4\]", during), story
    assert first.field("NodeList") == "n[1,3-4]"
    assert_the_run_is_complete(run_dir)


def assert_the_run_is_complete(run_dir: Path) -> None:
    records = read_metrics(run_dir)
    assert [record["rollout_step"] for record in records] == [0, 1]
    for step in range(2):
        contents = read_ledger(step_path(run_dir / "ledger", step))
        assert contents.torn_bytes == 0
        responses = contents.state.finished_responses()
        assert len(responses) == 2 * BATCH
        assert {response.weight_version for response in responses} == {step}
        longest = sorted(response.num_tokens for response in responses)[-2:]
        assert (longest == [LONG_TOKENS] * 2) == (step == 1)
        truncated = [r for r in responses if r.finish_reason is FinishReason.length]
        assert len(truncated) == (2 if step == 1 else 0)
        # Of all four ranks, those that have left for good included.
        assert records[step]["occupancy/worker_iterations"] > 0
    assert records[1]["membership/num_released"] == 2
    assert records[1]["occupancy/worker_iterations"] < records[1]["occupancy/static_worker_iterations"]
    assert (run_dir / "hf" / "model.safetensors").exists()


@pytest.mark.full
def test_the_quickstart_completes_over_four_nodes(submit: Submit, tmp_path: Path) -> None:
    overrides = [
        *("experiment=quickstart", "cluster.num_devices_per_node=2", "rollout.collectives=gloo"),
        f"cluster.server_start_timeout_s={START_DEADLINE_S}",
        f"cluster.trainer_start_timeout_s={START_DEADLINE_S}",
    ]
    job = submit("train.sbatch", *overrides, options=["--nodes=4"], variables={"SERVER_NODES": "2"})
    assert job.wait(QUICKSTART_DEADLINE_S) == "COMPLETED", job.story()
    records = read_metrics(tmp_path / "run")
    assert [record["rollout_step"] for record in records] == list(range(25))
    rewards = [record["reward/mean"] for record in records]
    print(f"reward: first 5 steps {sum(rewards[:5]) / 5:.3f}, last 5 steps {sum(rewards[-5:]) / 5:.3f}")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
    last_five = records[-5:]
    occupied = sum(record["occupancy/worker_iterations"] for record in last_five)
    assert occupied < sum(record["occupancy/static_worker_iterations"] for record in last_five)
