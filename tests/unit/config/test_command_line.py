"""What works: presets, overrides, own presets, multirun, --cfg and --help; and the exit codes."""

from omegaconf import OmegaConf

from flexfloor.cli.arguments import overrides_first
from flexfloor.config.schema import Placement
from flexfloor.errors import ChildProcessError, DataError


def test_driver_gets_dataclasses_and_gives_the_exit_code(cli, driver) -> None:
    driver.answers = [5]
    outcome = cli("experiment=quickstart", "rollout.ep_size=2", "scheduling=least_inflight", "seed=7")
    assert outcome.code == 5
    assert outcome.err == ""
    (config,) = outcome.configs
    assert (config.rollout.ep_size, config.seed, config.num_steps) == (2, 7, 25)
    assert config.scheduling.placement is Placement.least_inflight


def test_run_folder_is_named_by_the_experiment_and_holds_the_resolved_config(cli, tmp_path) -> None:
    outcome = cli("experiment=quickstart")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("_quickstart")
    assert outcome.configs[0].run_dir == str(folder)
    saved = OmegaConf.load(folder / "config.yaml")
    assert saved.run_dir == str(folder)
    assert saved.rollout.collectives == "shm"
    assert saved.trainer.max_grad_norm == 1.0


def test_own_preset_folder_is_searched(cli, tmp_path) -> None:
    preset = tmp_path / "presets" / "rollout" / "mine.yaml"
    preset.parent.mkdir(parents=True)
    preset.write_text("defaults: [tiny]\nmax_response_tokens: 100\n", encoding="utf-8")
    outcome = cli("--config-dir=presets", "experiment=quickstart", "rollout=mine")
    assert outcome.code == 0, outcome.err
    assert outcome.configs[0].rollout.max_response_tokens == 100
    assert outcome.configs[0].rollout.num_prompt_groups == 32


def test_flags_may_stand_anywhere_among_the_overrides() -> None:
    line = [
        "experiment=a",
        "--cfg",
        "job",
        "seed=1",
        "--resolve",
        "--config-dir",
        "my=presets",
        "num_steps=2",
    ]
    ordered = [
        "experiment=a",
        "seed=1",
        "num_steps=2",
        "--cfg",
        "job",
        "--resolve",
        "--config-dir",
        "my=presets",
    ]
    assert overrides_first(line) == ordered
    assert overrides_first(["--info", "seed=1"]) == ["seed=1", "--info"]
    assert overrides_first(["--info", "defaults", "seed=1"]) == ["seed=1", "--info", "defaults"]


def test_cfg_job_shows_and_runs_nothing(cli, tmp_path) -> None:
    outcome = cli("experiment=quickstart", "num_steps=5", "--cfg", "job", "--resolve")
    assert outcome.code == 0
    shown = OmegaConf.create(outcome.out)
    assert shown.num_steps == 5
    assert shown.run_dir.endswith("_quickstart")
    assert outcome.configs == []
    assert list(tmp_path.iterdir()) == []


def test_help_names_groups_keys_and_examples(cli) -> None:
    outcome = cli("--help")
    assert outcome.code == 0
    for part in (
        "flexfloor-train experiment=quickstart",
        "scheduling: flexfloor, least_inflight, verl",
        "max_grad_norm",
    ):
        assert part in outcome.out


def test_multirun_runs_every_job_in_its_own_folder_and_the_largest_code_counts(cli, driver, tmp_path) -> None:
    driver.answers = [ChildProcessError("the server ended"), 0]
    outcome = cli("experiment=quickstart", "--multirun", "num_steps=0,3,4")
    assert outcome.code == 2
    assert [config.num_steps for config in outcome.configs] == [3, 4]
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert [line.partition(":")[2][:14] for line in errors] == [" num_steps=0: ", " the server en"]
    (sweep,) = (tmp_path / "runs" / "multirun").iterdir()
    assert [config.run_dir for config in outcome.configs] == [str(sweep / "1"), str(sweep / "2")]


def test_failure_of_a_process_ends_with_code_1_and_no_traceback(cli, driver) -> None:
    driver.answers = [ChildProcessError("the server ended")]
    outcome = cli("experiment=quickstart")
    assert (outcome.code, outcome.err) == (1, "error: the server ended\n")


def test_multirun_with_a_wrong_key_starts_no_job(cli) -> None:
    outcome = cli("experiment=quickstart", "--multirun", "seeed=0,1")
    assert outcome.code == 2
    assert outcome.configs == []
    assert "Did you mean seed?" in outcome.err


def test_data_error_of_the_driver_is_the_users(cli, driver) -> None:
    driver.answers = [DataError("train.jsonl line 3: no prompt")]
    outcome = cli("experiment=quickstart")
    assert (outcome.code, outcome.err) == (2, "error: train.jsonl line 3: no prompt\n")


def test_unexpected_error_keeps_its_traceback_and_its_log(cli, driver, tmp_path) -> None:
    driver.answers = [ZeroDivisionError("bug")]
    outcome = cli("experiment=quickstart")
    assert outcome.code == 1
    assert outcome.err.count("ZeroDivisionError: bug") == 1
    (log,) = (tmp_path / "runs").glob("*/train.log")
    assert "ZeroDivisionError: bug" in log.read_text(encoding="utf-8")


def test_full_errors_on_request(cli, monkeypatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    outcome = cli("experiment=quickstart", "rollout.ep_siz=3")
    assert outcome.code == 2
    assert "Traceback" in outcome.err
