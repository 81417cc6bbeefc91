"""Each mistake, through the console function: exit code 2, one line with key and fix, nothing started."""

import pytest

CASES = [
    # (overrides, parts that the one line must have)
    (["rollout.ep_siz=4"], ["rollout.ep_siz=4", "Did you mean rollout.ep_size?"]),
    (["ep_size=4"], ["ep_size=4", "Did you mean rollout.ep_size or trainer.ep_size?"]),
    (["+rollout.extra=1"], ["rollout.extra=1", "there is no such key"]),
    (["rollout.ep_size=many"], ["rollout.ep_size=many", "Integer"]),
    (["cluster.device=tpu"], ["cluster.device=tpu", "[cpu, cuda]"]),
    (["model=tiny"], ["model=tiny", "Did you mean tiny_moe?", "qwen3_30b_a3b, tiny_moe"]),
    (["num_steps=[["], ["num_steps=[[", "cannot be read as KEY=VALUE"]),
    (["num_steps=???"], ["num_steps", "has no value"]),
    (["run_dir=${nothing.here}"], ["nothing.here"]),
    (["rollout.ep_size=16"], ["rollout.ep_size=16", "model.num_experts=8", "1, 2, 4, 8"]),
    (["rollout.kv_cache_tokens=207"], ["rollout.kv_cache_tokens=207", "set rollout.kv_cache_tokens to 208"]),
    (["algorithm.num_minibatches=5"], ["algorithm.num_minibatches=5", "=512"]),
    (["trainer.learning_rate=-1e-4"], ["trainer.learning_rate=-0.0001", "0 or more"]),
    (["rollout.top_p=0.9"], ["rollout.top_p=0.9", "logprobs"]),
    (["rollout.collectives=nccl"], ["rollout.collectives='nccl'", "set rollout.collectives=gloo"]),
    (["+rollout.server_args.tp-size=2"], ["rollout.server_args.tp-size=2", "set rollout.ep_size"]),
    (["rollout.server_args.log-level=info"], ["write +rollout.server_args.log-level=info"]),
    (["cluster.device_memory_bytes=1000000"], ["rollout.ep_size=4", "GiB"]),
    (["trainer.num_ranks=3"], ["trainer.num_ranks=3", "multiple of 2"]),
    (["membership=always"], ["membership=always", "elastic, static"]),
    (["membership.mode=loose"], ["membership.mode=loose", "[static, elastic]"]),
    (["membership.flor=2"], ["membership.flor=2", "Did you mean membership.floor?"]),
    (["membership.floor=0"], ["membership.floor=0", "at least 1"]),
    (["membership.floor=5"], ["membership.floor=5", "rollout.ep_size=4", "1 ... 4"]),
    (["scheduling.wall_budget=-1"], ["scheduling.wall_budget=-1", "0 or more"]),
    (["membership.operation_timeout_s=0"], ["membership.operation_timeout_s=0", "above 0"]),
    (["membership.park_frees=[kv,disk]"], ["membership.park_frees", "unknown: disk", "experts, kv, dense"]),
    (["membership.expert_slots=some"], ["membership.expert_slots=some", "exact"]),
    (["rollout.ep_size=1"], ["membership.mode='elastic'", "rollout.ep_size to 2 or more"]),
    (
        ["cluster.server_url=http://localhost:30000"],
        ["membership.folder=None", "--flexfloor-folder", "membership=static"],
    ),
    (["+rollout.server_args.flexfloor-floor=2"], ["server_args.flexfloor-floor=2", "set membership.floor"]),
    (["data=jsonl"], ["data.path=None", "set data.path"]),
    (["data.reward=no_such_module:score"], ["data.reward='no_such_module:score'", "PYTHONPATH"]),
    (["run_dir=/dev/null/run"], ["run_dir='/dev/null/run'", "/dev/null is not a folder"]),
    (["logging=wandb"], ["logging.wandb_project='flexfloor'", "pip install"]),
    (["--config-dir=nowhere"], ["nowhere", "not found"]),
]


@pytest.mark.parametrize(("overrides", "parts"), CASES, ids=[" ".join(case[0]) for case in CASES])
def test_is_refused_with_one_clear_line(cli, overrides, parts, monkeypatch) -> None:
    hide_package(monkeypatch, "wandb")
    outcome = cli("experiment=quickstart", *overrides)
    assert outcome.code == 2
    assert outcome.configs == []
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("error: ")
    assert "Fix: " in lines[0]
    for part in parts:
        assert part in lines[0]


def hide_package(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    from flexfloor.config import machine

    real = machine.find_spec
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == hidden else real(name))


def test_no_experiment_says_how_to_choose_one(cli) -> None:
    outcome = cli()
    assert outcome.code == 2
    assert outcome.err == (
        "error: num_steps: has no value. Fix: choose an experiment, e.g. experiment=quickstart, or add "
        "num_steps=... to the command line or your preset\n"
    )


def test_misspelt_key_in_own_preset_is_named(cli, tmp_path) -> None:
    preset = tmp_path / "presets" / "experiment" / "mine.yaml"
    preset.parent.mkdir(parents=True)
    preset.write_text("# @package _global_\nrollout:\n  ep_siz: 4\n", encoding="utf-8")
    outcome = cli("--config-dir=presets", "experiment=mine")
    assert outcome.code == 2
    assert "Did you mean rollout.ep_size?" in outcome.err
