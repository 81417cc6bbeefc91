"""What flexfloor-prepare leaves for the nodes, and what a run does that comes without it."""

import stat
from pathlib import Path

import pytest

from flexfloor.cli.compose import compose, to_train_config
from flexfloor.config import TrainConfig
from flexfloor.driver.attached import prepare_nodes
from flexfloor.driver.prepare import prepare_model
from flexfloor.driver.services import Services
from flexfloor.errors import ConfigError
from flexfloor.node_plan import NodePlan, decode_plan
from flexfloor.processes import ChildProcesses
from flexfloor.report.console import RunConsole
from flexfloor.training.keys import read_keys
from flexfloor.training.launch import decode_spec

ATTACHED = ("cluster.server_url=http://n1:2000", "cluster.trainer_endpoint=tcp://n3:2045")


def make_config(folder: Path, *overrides: str) -> TrainConfig:
    shape = ("model.tiny.warmup_steps=0", "rollout.collectives=gloo", "logging.progress=false")
    places = (f"model.path={folder / 'models'}", f"run_dir={folder / 'run'}")
    return to_train_config(compose(["experiment=quickstart", *shape, *places, *overrides]))


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    keys, log = (
        f"cluster.trainer_keys={tmp_path / 'run/keys.json'}",
        f"cluster.iteration_log={tmp_path / 'log'}",
    )
    return make_config(tmp_path, *ATTACHED, keys, log, f"membership.folder={tmp_path / 'm'}")


def value_of(plan: NodePlan, flag: str) -> str:
    return plan.server_argv[plan.server_argv.index(flag) + 1]


def test_the_nodes_find_all_that_they_need(config: TrainConfig, tmp_path: Path) -> None:
    plan = decode_plan(prepare_nodes(config).read_bytes())
    assert (plan.server_ranks, plan.trainer_ranks, plan.device) == (4, 2, "cpu")
    assert (value_of(plan, "--host"), value_of(plan, "--port")) == ("n1", "2000")
    assert value_of(plan, "--flexfloor-folder") == str(tmp_path / "m")
    assert value_of(plan, "--flexfloor-iteration-log") == str(tmp_path / "log")
    spec = decode_spec(Path(plan.trainer_spec).read_bytes())
    assert spec.endpoint == "tcp://n3:2045"
    assert spec.keys_path == config.cluster.trainer_keys
    assert spec.checkpoint_path == value_of(plan, "--model-path")
    assert (Path(spec.checkpoint_path) / "model.safetensors").exists()
    assert read_keys(tmp_path / "run/keys.json").server_secret is not None
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_a_run_without_the_preparation_is_told_of_it(config: TrainConfig, tmp_path: Path) -> None:
    with ChildProcesses() as children:
        services = Services(config, children, tmp_path)
        with pytest.raises(ConfigError, match="run flexfloor-prepare with the same overrides first"):
            prepare_model(config, services, RunConsole(progress=False))
        with pytest.raises(ConfigError, match=r"cluster\.trainer_keys=.*No such file"):
            services.start_trainer(tmp_path, "trainer")


@pytest.mark.parametrize("missing", [0, 1])
def test_what_the_run_starts_by_itself_is_not_prepared(missing: int, tmp_path: Path) -> None:
    config = make_config(tmp_path, ATTACHED[1 - missing], "membership=static")
    with pytest.raises(ConfigError, match="flexfloor-train would start it by itself"):
        prepare_nodes(config)
