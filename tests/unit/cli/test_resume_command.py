"""`resume=RUN_DIR`: the run's own configuration, and only such overrides as leave the run the same."""

import sys
from pathlib import Path

import pytest

from flexfloor.cli import train
from flexfloor.cli.compose import compose, save_resolved, to_train_config
from flexfloor.cli.resume import resumed_config, with_resume
from flexfloor.errors import ConfigError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "a run's folder"
    overrides = ["experiment=quickstart", "seed=5", "+rollout.server_args.chunked-prefill-size=64"]
    node = compose([*overrides, "run_dir=elsewhere", "trainer.learning_rate=0.125"])
    save_resolved(node, str(folder))
    return folder


def test_the_command_line_goes_on_in_the_runs_folder(run_dir: Path) -> None:
    quoted = str(run_dir).replace("'", "\\'")
    expected = [f"resume={run_dir}", "hydra.output_subdir=null", f"hydra.run.dir='{quoted}'"]
    assert with_resume([f"resume={run_dir}"]) == expected
    kept = [f"resume={run_dir}", "hydra.run.dir=mine"]
    assert with_resume(kept) == [*kept, "hydra.output_subdir=null"]
    assert with_resume(["experiment=quickstart"]) == ["experiment=quickstart"]


def test_the_configuration_is_that_of_the_run(run_dir: Path) -> None:
    config = to_train_config(resumed_config(run_dir, []))
    assert (config.seed, config.trainer.learning_rate) == (5, 0.125)
    assert config.rollout.server_args == {"chunked-prefill-size": 64}
    assert (config.run_dir, config.resume) == (str(run_dir), str(run_dir))


def test_what_leaves_the_run_the_same_may_change(run_dir: Path) -> None:
    overrides = ["num_steps=99", "membership.floor=2", "trainer.checkpoint_keep=7"]
    overrides += ["+rollout.server_args.log-level=error", "cluster.server_start_timeout_s=1000"]
    config = to_train_config(resumed_config(run_dir, overrides))
    assert (config.num_steps, config.membership.floor, config.trainer.checkpoint_keep) == (99, 2, 7)
    assert config.rollout.server_args == {"chunked-prefill-size": 64, "log-level": "error"}


def test_a_secret_that_was_masked_has_to_be_given_again(run_dir: Path) -> None:
    path = run_dir / "config.yaml"
    path.write_text(path.read_text().replace("chunked-prefill-size: 64", "api-key: '***'"))
    with pytest.raises(ConfigError, match=r"give it again: \+rollout.server_args.api-key"):
        resumed_config(run_dir, [])
    config = to_train_config(resumed_config(run_dir, ["+rollout.server_args.api-key=known"]))
    assert config.rollout.server_args == {"api-key": "known"}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("seed=6", "seed='6': would change what the run draws"),
        ("trainer.learning_rate=1", "would change what the run draws"),
        ("rollout.ep_size=2", "would change what the run draws"),
        ("trainer=megatron_tiny", "keeps the groups"),
        ("experiment=quickstart", "keeps the groups"),
    ],
)
def test_what_would_make_it_another_run_is_refused(run_dir: Path, override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resumed_config(run_dir, [override])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(["resume=nowhere"], "there is no run"), (["resume={}", "--multirun"], "one run")],
)
def test_no_run_to_go_on_with_is_refused_before_anything_is_made(
    run_dir: Path,
    arguments: list[str],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = [text.format(run_dir) for text in arguments]
    monkeypatch.chdir(run_dir)
    monkeypatch.setattr(sys, "argv", ["flexfloor-train", *named])
    assert train.main() == 2
    assert problem in capsys.readouterr().err
    assert sorted(path.name for path in run_dir.iterdir()) == ["config.yaml"]


def test_a_new_run_does_not_begin_in_the_folder_of_another(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run_dir.parent / "plain"
    (plain / "ledger").mkdir(parents=True)
    (plain / "ledger" / "step-000000.ledger").touch()
    named = [f"run_dir={plain}", f"hydra.run.dir={plain}"]
    monkeypatch.setattr(sys, "argv", ["flexfloor-train", "experiment=quickstart", *named])
    assert train.main() == 2
    assert f"flexfloor-train resume={plain}" in capsys.readouterr().err
    assert not (plain / "config.yaml").exists()
