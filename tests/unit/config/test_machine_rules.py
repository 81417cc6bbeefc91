"""Rules that look at files, permissions and packages."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from flexfloor.config import machine
from flexfloor.config.reward_function import check_reward_function
from flexfloor.config.rules import validate
from flexfloor.config.schema import DataSource, Device, Dtype, ModelConfig, ModelSource
from flexfloor.errors import ConfigError

HF_CONFIG = {
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


def hf_model(path: Path, **changes: Any) -> ModelConfig:
    stated = dict(
        name="qwen3_30b_a3b",
        source=ModelSource.hf,
        path=str(path),
        dtype=Dtype.bfloat16,
        num_layers=48,
        num_experts=128,
        num_active_experts=8,
        expert_bytes=9 * 1024**2,
        dense_bytes=3_082_186_752,
        kv_bytes_per_token=96 * 1024,
        context_tokens=40960,
    )
    return ModelConfig(**{**stated, **changes})


def refused_key(call, *args: Any) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        call(*args)
    return caught.value.key, str(caught.value)


def test_checkpoint_that_agrees_is_accepted(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG), encoding="utf-8")
    machine.check_hf_checkpoint(hf_model(tmp_path))


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"num_experts": 64}, "set model.num_experts=128"),
        ({"num_layers": 24}, "set model.num_layers=48"),
        ({"num_active_experts": 4}, "set model.num_active_experts=8"),
        ({"expert_bytes": 1}, "set model.expert_bytes=9437184"),
        ({"kv_bytes_per_token": 1}, "set model.kv_bytes_per_token=98304"),
        ({"context_tokens": 40961}, "set model.context_tokens to at most 40960"),
    ],
)
def test_checkpoint_that_contradicts_the_model_group(tmp_path, changes, fix) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG), encoding="utf-8")
    key, text = refused_key(machine.check_hf_checkpoint, hf_model(tmp_path, **changes))
    assert key == f"model.{next(iter(changes))}"
    assert fix in text


def test_checkpoint_folder_without_a_readable_config(tmp_path) -> None:
    assert "no such folder" in refused_key(machine.check_hf_checkpoint, hf_model(tmp_path / "none"))[1]
    assert "has no config.json" in refused_key(machine.check_hf_checkpoint, hf_model(tmp_path))[1]
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert "cannot be read" in refused_key(machine.check_hf_checkpoint, hf_model(tmp_path))[1]


@pytest.fixture
def reward_folder(tmp_path, monkeypatch) -> Path:
    """On the import path; importing any of its modules would raise."""
    package = tmp_path / "house_rules"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    text = "raise RuntimeError('imported')\ndef score(): ...\nasync def later(): ...\nlimit = 3\n"
    (package / "maths.py").write_text(text, encoding="utf-8")
    (package / "broken.py").write_text("def score(:\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_reward_function_is_found_without_importing_its_module(reward_folder) -> None:
    check_reward_function("house_rules.maths:score")


@pytest.mark.parametrize(
    ("reward", "part"),
    [
        ("house_rules.maths:scor", "one of its functions: score"),
        ("house_rules.maths:limit", "is not a function"),
        ("house_rules.maths:later", "is not a function"),
        ("house_rules.broken:score", "repair the module"),
        ("house_rules.chess:score", "no module house_rules.chess"),
        ("house_rules.maths.deep:score", "no module house_rules.maths.deep"),
    ],
)
def test_reward_function_that_cannot_be_called(reward_folder, reward, part) -> None:
    key, text = refused_key(check_reward_function, reward)
    assert key == "data.reward"
    assert part in text


@pytest.mark.parametrize("hidden", ["sglang", "megatron", "wandb"])
def test_missing_package_is_refused_unless_it_runs_elsewhere(
    quickstart, change, monkeypatch, tmp_path, hidden
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == hidden else object())
    keys = {
        "sglang": ("cluster.server_url", "http://localhost:1"),
        "megatron": ("cluster.trainer_endpoint", "tcp://localhost:1"),
        "wandb": ("logging.wandb_project", None),
    }
    key, elsewhere = keys[hidden]
    config = change(quickstart, {"logging.wandb_project": "mine"})
    assert refused_key(machine.check_machine, config)[0] == key
    machine.check_machine(change(config, {key: elsewhere}))


def test_gpu_cluster_needs_a_gpu_driver_only_where_processes_start_here(
    quickstart, change, monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    monkeypatch.setattr(machine, "_GPU_DRIVER_FILES", (tmp_path / "nvidiactl",))
    config = change(quickstart, {"cluster.device": Device.cuda})
    assert refused_key(machine.check_machine, config)[0] == "cluster.device"
    attached = {"cluster.server_url": "http://n:1", "cluster.trainer_endpoint": "tcp://n:2"}
    machine.check_machine(change(config, attached))
    (tmp_path / "nvidiactl").touch()
    machine.check_machine(config)


def test_data_path_must_exist(quickstart, change, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"data.source": DataSource.jsonl, "data.path": "a.jsonl", "data.reward": "exact"}
    config = change(quickstart, values)
    key, text = refused_key(machine.check_machine, config)
    assert (key, "no such file" in text) == ("data.path", True)


@pytest.mark.parametrize("key", ["run_dir", "model.path"])
def test_folders_to_write_must_be_possible(quickstart, change, tmp_path, monkeypatch, key) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    named, text = refused_key(validate, change(quickstart, {key: "file/sub"}))
    assert named == key
    assert "file is not a folder" in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_write_permission(quickstart, change, tmp_path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    key, text = refused_key(validate, change(quickstart, {"run_dir": str(tmp_path / "run")}))
    assert (key, "is not writable" in text) == ("run_dir", True)
