"""What a configuration makes of the scheduling side: clock, KV pools, names."""

from pathlib import Path

import pytest

from flexfloor.cli.compose import compose, to_train_config
from flexfloor.config import TrainConfig
from flexfloor.driver.scheduling import cost_clock, dataset_name, kv_tokens_of, rollout_shape, run_id
from flexfloor.scheduling.clocks import CorrectedClock

RUN = "run_dir=runs/test"
GPU = ["experiment=qwen3_30b_a3b_8xh200", "data.path=math.jsonl", "model.path=checkpoint", RUN]


def config_of(*line: str) -> TrainConfig:
    return to_train_config(compose([*line]))


@pytest.fixture(scope="module")
def quickstart() -> TrainConfig:
    return config_of("experiment=quickstart", RUN)


@pytest.fixture(scope="module")
def on_gpus() -> TrainConfig:
    return config_of(*GPU)


def test_a_cpu_counts_iterations_and_a_gpu_is_priced_and_corrected(
    quickstart: TrainConfig, on_gpus: TrainConfig
) -> None:
    assert cost_clock(quickstart).name == "neutral"
    clock = cost_clock(on_gpus)
    assert isinstance(clock, CorrectedClock)
    assert clock.clock.name == "h200"


def test_a_cpu_run_may_stand_for_a_gpu_run() -> None:
    line = ["scheduling.clock=h100", "scheduling.model_tokens_per_token=64"]
    clock = cost_clock(config_of("experiment=quickstart", RUN, *line))
    assert not isinstance(clock, CorrectedClock)
    assert "h100" in clock.name


def test_kv_pools(quickstart: TrainConfig, on_gpus: TrainConfig) -> None:
    assert kv_tokens_of(quickstart)(2) == 32768
    tokens = kv_tokens_of(on_gpus)(8)
    assert tokens is not None
    # 96 KiB a token: between a tenth and nine tenths of 141 GB.
    assert 140_000 < tokens < 1_300_000


def test_a_static_group_has_its_size_for_a_floor(quickstart: TrainConfig) -> None:
    assert rollout_shape(quickstart).floor == 1
    static = rollout_shape(config_of("experiment=quickstart", "membership=static", RUN))
    assert (static.floor, static.num_ranks, static.running_limit_per_rank) == (4, 4, 128)


def test_prepared_sets_bound_the_sizes() -> None:
    line = ["membership.member_sets=[[0,1],[0,1,2]]"]
    shape = rollout_shape(config_of("experiment=quickstart", RUN, *line))
    assert shape.allowed_sizes == (2, 3, 4)
    assert rollout_shape(config_of("experiment=quickstart", RUN)).allowed_sizes is None


def test_names(quickstart: TrainConfig, on_gpus: TrainConfig, tmp_path: Path) -> None:
    assert dataset_name(quickstart) == "arithmetic"
    assert dataset_name(on_gpus) == "jsonl/math.jsonl"
    assert dataset_name(config_of("experiment=quickstart", RUN, "scheduling.dataset=mine")) == "mine"
    assert run_id(tmp_path / "a") == run_id(tmp_path / "b" / ".." / "a")
    assert run_id(tmp_path / "a") != run_id(tmp_path / "other" / "a")
