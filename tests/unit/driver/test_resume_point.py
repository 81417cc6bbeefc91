"""Where a run goes on, what it takes off the record, and what it finds in old ledgers."""

import json
import multiprocessing
from pathlib import Path

import pytest

from flexfloor.cli.compose import compose, to_train_config
from flexfloor.config import TrainConfig
from flexfloor.config.resume_rules import config_digest, may_change
from flexfloor.driver import resume
from flexfloor.driver.checkpoints import Checkpoints, new_state
from flexfloor.driver.recorded import CUT_FILE, recorded_state, whole_step
from flexfloor.driver.resume import run_lock, run_start
from flexfloor.errors import ConfigError
from flexfloor.records import Finished, Progress, Submitted
from flexfloor.report.metrics import METRICS_FILE, read_metrics
from flexfloor.rollout.ledger import Ledger, step_path
from flexfloor.types import FinishReason, ResponseRequest


def config_of(run_dir: Path, *overrides: str, resumes: bool = True) -> TrainConfig:
    more = [f"resume={run_dir}"] if resumes else []
    return to_train_config(compose(["experiment=quickstart", f"run_dir={run_dir}", *more, *overrides]))


def save(run_dir: Path, step: int, config: TrainConfig) -> None:
    state = new_state(
        step=step,
        weight_version=step,
        weight_checksum="sum",
        seed=0,
        config_digest=config_digest(config),
        run_id="first name",
        steps_per_pass=5,
        windows={"window-0000-0000.json": {"plan": step}},
        ledger=Path("/nowhere"),
    )

    def write(path: str) -> None:
        Path(path).mkdir(parents=True)
        Path(path, "weights").write_text("w")

    Checkpoints(run_dir / "checkpoints", keep=9).save(state, write)


def records(run_dir: Path, steps: range) -> None:
    lines = [json.dumps({"rollout_step": step, "reward/mean": step / 8}) + "\n" for step in steps]
    (run_dir / METRICS_FILE).write_text("".join(lines) + '{"rollout_step": 99, "torn')


def test_a_new_run_begins_at_its_first_step(tmp_path: Path) -> None:
    start = run_start(config_of(tmp_path, resumes=False), pytest.fail)
    assert (start.first_step, start.checkpoint, start.is_resume) == (0, None, False)


def test_a_resumed_one_begins_at_its_checkpoint_and_keeps_later_figures_aside(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    said: list[str] = []
    save(tmp_path, 2, config)
    save(tmp_path, 4, config)
    records(tmp_path, range(6))
    folder = tmp_path / "schedule"
    folder.mkdir()
    (folder / "window-0000-0000.json").write_text("{}")
    (folder / "window-0000-0001.json").write_text("{}")
    start = run_start(config, said.append)
    assert (start.first_step, start.weight_checksum, start.run_id) == (4, "sum", "first name")
    assert start.checkpoint == tmp_path / "checkpoints" / "step-000004"
    assert [record["rollout_step"] for record in read_metrics(tmp_path)] == [0, 1, 2, 3]
    assert {step: record["reward/mean"] for step, record in start.records.items()} == {4: 0.5, 5: 0.625}
    assert json.loads((folder / "window-0000-0000.json").read_text()) == {"plan": 4}
    assert not (folder / "window-0000-0001.json").exists()
    # Killed again before it got anywhere, and its newest checkpoint has gone bad.
    (start.checkpoint / "weights").write_text("x")
    again = run_start(config, said.append)
    assert (again.first_step, sorted(again.records)) == (2, [2, 3, 4, 5])
    assert any("DAMAGED" in line and "step-000004" in line for line in said)
    assert (tmp_path / CUT_FILE).exists()


def test_without_any_checkpoint_it_begins_anew_over_its_record(tmp_path: Path) -> None:
    records(tmp_path, range(3))
    start = run_start(config_of(tmp_path), lambda text: None)
    assert (start.first_step, start.checkpoint, sorted(start.records)) == (0, None, [0, 1, 2])


def test_its_name_in_the_history_stays_when_the_folder_moves(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first = run_start(config_of(tmp_path / "a", resumes=False), pytest.fail).run_id
    (tmp_path / "a").rename(tmp_path / "b")
    assert run_start(config_of(tmp_path / "b"), lambda text: None).run_id == first


def test_what_would_be_another_run_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    save(tmp_path, 3, config)
    with pytest.raises(ConfigError, match="num_steps=3: the run has done 3 steps"):
        run_start(config_of(tmp_path, "num_steps=3"), lambda text: None)
    # Trained to the end since that checkpoint.
    records(tmp_path, range(4))
    with pytest.raises(ConfigError, match="num_steps=4: the run has done 4 steps"):
        run_start(config_of(tmp_path, "num_steps=4", "save_hf=false"), lambda text: None)
    assert len(read_metrics(tmp_path)) == 4
    with pytest.raises(ConfigError, match="other values in config"):
        run_start(config_of(tmp_path, "trainer.learning_rate=1.0"), lambda text: None)


def test_the_digest_holds_what_is_drawn_and_learnt_and_nothing_else(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    for override in ("num_steps=7", "membership.floor=2", "trainer.checkpoint_keep=5"):
        assert config_digest(config_of(tmp_path, override)) == config_digest(config)
    for override in ("seed=1", "algorithm.clip_low=0.1", "rollout.num_prompt_groups=8", "data.seed=4"):
        assert config_digest(config_of(tmp_path, override)) != config_digest(config)
    assert may_change("rollout.server_args.api-key")
    assert not may_change("rollout.ep_size")


def hold(run_dir: Path, has_it: "multiprocessing.synchronize.Event") -> None:
    with run_lock(run_dir):
        has_it.set()
        multiprocessing.Event().wait()


def test_one_driver_a_run_and_a_killed_one_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_LOCK_WAIT_S", 0.0)
    context = multiprocessing.get_context("spawn")
    has_it = context.Event()
    holder = context.Process(target=hold, args=(tmp_path, has_it))
    holder.start()
    assert has_it.wait(60)
    with pytest.raises(ConfigError, match="another process is running it"), run_lock(tmp_path):
        pass
    holder.kill()
    holder.join(10)
    with run_lock(tmp_path):
        pass


REQUESTS = [
    ResponseRequest(
        response_id=f"0/p/{index}",
        rollout_step=0,
        prompt_id="p",
        sample_index=index,
        prompt_token_ids=(1,),
        max_response_tokens=2,
        sampling_seed=index,
    )
    for index in range(2)
]


def write_ledger(folder: Path, num_finished: int, checksum: str) -> Path:
    path = step_path(folder, 0)
    with Ledger.open(
        path, rollout_step=0, weight_version=0, num_responses=2, weight_checksum=checksum
    ) as ledger:
        for request in REQUESTS:
            name = request.response_id
            ledger.append(
                Submitted(name, 1, 0, 1.0, "p", request.sample_index, 2, request.sampling_seed, (1,))
            )
            ledger.append(Progress(name, 1, 0, [5], [-0.5]))
        for request in REQUESTS[:num_finished]:
            ledger.append(Finished(request.response_id, 1, 0, 0, FinishReason.stop, 1, 2, 1.0, 2.0))
    return path


def recorded(folder: Path, checksum: str) -> tuple[object, str]:
    return recorded_state(folder, rollout_step=0, weight_version=0, weight_checksum=checksum)


@pytest.mark.parametrize("num_finished", [1, 2])
def test_a_record_of_the_same_weights_is_used(tmp_path: Path, num_finished: int) -> None:
    write_ledger(tmp_path, num_finished, "sum")
    state, story = recorded_state(tmp_path, rollout_step=0, weight_version=0, weight_checksum="sum")
    assert state is not None
    assert f"{num_finished} of 2 responses were finished" in story
    responses = whole_step(state, REQUESTS)
    assert (responses is not None) == (num_finished == 2)
    assert responses is None or [one.response_id for one in responses] == ["0/p/0", "0/p/1"]


@pytest.mark.parametrize("checksum", ["other", ""])
def test_a_record_of_other_weights_is_set_aside_whole(tmp_path: Path, checksum: str) -> None:
    """Also its finished responses: keeping the short ones alone would be a bias."""
    for number in (1, 2):
        path = write_ledger(tmp_path, 1, checksum)
        state, story = recorded(tmp_path, "sum")
        assert state is None
        assert "the whole step is drawn anew" in story
        assert not path.exists()
        assert path.with_name(f"{path.name}.aside-{number}").exists()


def test_a_damaged_record_is_set_aside(tmp_path: Path) -> None:
    path = write_ledger(tmp_path, 2, "sum")
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    state, story = recorded(tmp_path, "sum")
    assert (state, path.exists()) == (None, False)
    assert "damaged" in story


def test_no_record_says_nothing(tmp_path: Path) -> None:
    assert recorded(tmp_path, "sum") == (None, "")
