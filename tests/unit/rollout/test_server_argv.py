"""The flexfloor-serve command line, and what rollout.server_args may not say."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexfloor.config import (
    AlgorithmConfig,
    ClusterConfig,
    DataConfig,
    LoggingConfig,
    MembershipConfig,
    ModelConfig,
    ReleaseConfig,
    RolloutConfig,
    SchedulingConfig,
    TrainConfig,
    TrainerConfig,
)
from flexfloor.config.choices import ReleaseUse
from flexfloor.config.schema import (
    Collectives,
    DataSource,
    Device,
    Dtype,
    ExpertSlots,
    MembershipMode,
    ModelSource,
    Placement,
    WeightSyncPath,
)
from flexfloor.errors import ConfigError
from flexfloor.rollout.server import server_argv
from flexfloor.rollout.step import StepLimits
from sglang_patches.serve_args import parse


def make_config(**rollout: Any) -> TrainConfig:
    values = {
        "ep_size": 4,
        "num_prompt_groups": 2,
        "num_responses_per_prompt": 2,
        "max_prompt_tokens": 16,
        "max_response_tokens": 64,
        "collectives": Collectives.gloo,
        "kv_cache_tokens": 8192,
    }
    return TrainConfig(
        cluster=ClusterConfig(name="c", device=Device.cpu, num_devices_per_node=4, device_memory_bytes=1),
        model=ModelConfig(
            name="m",
            source=ModelSource.hf,
            path="ckpt",
            dtype=Dtype.float32,
            num_layers=1,
            num_experts=8,
            num_active_experts=2,
            expert_bytes=1,
            dense_bytes=1,
            kv_bytes_per_token=1,
            context_tokens=512,
        ),
        data=DataConfig(source=DataSource.arithmetic, num_prompts=1, reward="arithmetic"),
        rollout=RolloutConfig(**{**values, **rollout}),
        membership=MembershipConfig(mode=MembershipMode.static),
        release=ReleaseConfig(use=ReleaseUse.park),
        scheduling=SchedulingConfig(placement=Placement.round_robin),
        algorithm=AlgorithmConfig(),
        trainer=TrainerConfig(
            num_ranks=1, micro_batch_tokens=1, learning_rate=1e-4, weight_sync=WeightSyncPath.disk
        ),
        logging=LoggingConfig(),
        seed=11,
        num_steps=1,
        run_dir="runs/x",
    )


def argv(**rollout: Any) -> list[str]:
    return server_argv(make_config(**rollout), port=31000, model_path="ckpt", weight_version=3)


def test_four_ranks_on_cpu() -> None:
    assert argv() == [
        sys.executable, "-m", "sglang_patches.serve",
        "--host", "127.0.0.1", "--port", "31000", "--model-path", "ckpt", "--weight-version", "3",
        "--device", "cpu", "--dtype", "float32", "--context-length", "512", "--random-seed", "11",
        "--skip-tokenizer-init",
        "--tp-size", "4", "--ep-size", "4", "--dp-size", "4",
        "--enable-dp-attention", "--enable-dp-lm-head", "--moe-dense-tp-size", "1",
        "--flexfloor-collectives", "gloo",
        "--max-running-requests", "256", "--stream-interval", "16", "--incremental-streaming-output",
        "--max-total-tokens", "8192", "--enable-deterministic-inference",
    ]  # fmt: skip


def test_one_rank_has_no_attention_dp_and_nccl_is_the_engines_own() -> None:
    flags = argv(ep_size=1, collectives=Collectives.nccl, deterministic=False, kv_cache_tokens=None)
    assert "--enable-dp-attention" not in flags
    assert "--flexfloor-collectives" not in flags
    assert "--enable-deterministic-inference" not in flags
    assert "--max-total-tokens" not in flags
    assert flags[flags.index("--tp-size") + 1] == "1"


def test_the_iteration_log_is_passed_on_where_it_is_wanted() -> None:
    plain = server_argv(make_config(), port=31000, model_path="ckpt")
    flags = server_argv(make_config(), port=31000, model_path="ckpt", iteration_log_folder=Path("/run/log"))
    assert flags[:-2] == plain
    assert parse(flags[3:]).iteration_log == "/run/log"


def membership_argv(membership: MembershipConfig, folder: Path | None = None) -> list[str]:
    config = replace(make_config(), membership=membership)
    return server_argv(config, port=31000, model_path="ckpt", membership_folder=folder)


def test_a_static_group_is_served_without_any_flag_of_membership(tmp_path: Path) -> None:
    static = MembershipConfig(mode=MembershipMode.static, floor=2)
    assert membership_argv(static, tmp_path) == server_argv(make_config(), port=31000, model_path="ckpt")


def test_an_elastic_group_gets_every_key_of_its_membership_and_the_server_takes_them() -> None:
    elastic = MembershipConfig(
        mode=MembershipMode.elastic,
        floor=2,
        operation_timeout_s=45.5,
        expert_slots=ExpertSlots.reserved,
        park_frees=["kv", "dense"],
    )
    flags = membership_argv(elastic, Path("/run/m"))
    expected = {
        "--flexfloor-membership": "elastic",
        "--flexfloor-floor": "2",
        "--flexfloor-folder": "/run/m",
        "--flexfloor-expert-slots": "reserved",
        "--flexfloor-park-frees": "kv,dense",
        "--flexfloor-prepare-timeout": "45.5",
    }
    assert {flag: flags[flags.index(flag) + 1] for flag in expected} == expected
    taken = parse(flags[3:])
    assert (taken.membership, taken.floor, taken.folder, taken.park_frees) == (
        "elastic", 2, "/run/m", ("kv", "dense"),
    )  # fmt: skip
    assert (taken.expert_slots, taken.prepare_timeout_s) == ("reserved", 45.5)


def test_a_rank_that_frees_nothing_says_so_to_the_server() -> None:
    flags = membership_argv(MembershipConfig(mode=MembershipMode.elastic, park_frees=[]))
    assert flags[flags.index("--flexfloor-park-frees") + 1] == ""
    assert "--flexfloor-folder" not in flags
    assert parse(flags[3:]).park_frees == ()


def test_extra_flags_are_added_as_they_are_meant() -> None:
    flags = argv(
        server_args={
            "chunked-prefill-size": 4096,
            "enable_metrics": True,
            "--log-level": "warning",
            "disable-radix-cache": False,
            "cuda-graph-bs": [1, 2],
        }
    )
    assert flags[-8:] == [
        "--chunked-prefill-size", "4096", "--enable-metrics", "--log-level", "warning",
        "--cuda-graph-bs", "1", "2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enable-dp-lm-head", False),
        ("skip_tokenizer_init", False),
        ("--moe-dense-tp-size", 2),
        ("flexfloor-collectives", "shm"),
        ("weight-version", 5),
        ("enable-dp-attention-local-control-broadcast", True),
        ("incremental-streaming-output", True),
    ],
)
def test_a_flag_that_every_run_sets_is_refused_with_key_value_and_fix(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        argv(server_args={key: value})
    assert str(caught.value).startswith(f"rollout.server_args.{key}={value!r}: every run sets it to ")
    assert str(caught.value).endswith("Fix: remove it")


def test_a_flag_that_a_config_key_decides_never_gets_here() -> None:
    for key in ("tp_size", "--attn-dp-size", "max-total-tokens", "dtype", "flexfloor_floor"):
        with pytest.raises(ConfigError, match=f"rollout.server_args.{key}=1"):
            argv(server_args={key: 1})


def test_limits_take_the_smaller_of_context_and_kv_cache() -> None:
    config = make_config(response_timeout_s=5.0, max_attempts=2)
    assert StepLimits.from_config(config) == StepLimits(
        context_tokens=512, response_timeout_s=5.0, max_attempts=2
    )
    small = replace(config, rollout=replace(config.rollout, kv_cache_tokens=100))
    assert StepLimits.from_config(small).context_tokens == 100
    endless = replace(config, rollout=replace(config.rollout, kv_cache_tokens=None))
    assert StepLimits.from_config(endless).context_tokens == 512
