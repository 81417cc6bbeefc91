from pathlib import Path

import msgspec
import pytest

from flexfloor.config.schema import AlgorithmConfig, Device, Dtype, LossAgg, TrainerConfig
from flexfloor.training.launch import TrainerSpec, decode_spec, encode_spec, trainer_argv, trainer_env


def make_spec() -> TrainerSpec:
    return TrainerSpec(
        endpoint="ipc:///run/x",
        checkpoint_path="/models/m",
        device=Device.cpu,
        dtype=Dtype.float32,
        context_tokens=128,
        max_response_tokens=64,
        seed=7,
        trainer=TrainerConfig(num_ranks=2, ep_size=2, micro_batch_tokens=512, learning_rate=1e-4),
        algorithm=AlgorithmConfig(loss_agg=LossAgg.fixed, importance_cap=None),
        work_dir="work",
    )


def test_spec_survives_the_file() -> None:
    assert decode_spec(encode_spec(make_spec())) == make_spec()
    with pytest.raises(msgspec.ValidationError):
        decode_spec(b'{"endpoint": "ipc:///run/x"}')


def test_one_node_meets_on_its_own() -> None:
    argv = trainer_argv("/run/spec.json", 4)
    assert argv[argv.index("--nproc-per-node") + 1] == "4"
    assert "--standalone" in argv
    assert argv[-4:] == ["-m", "flexfloor.training.trainer", "--spec", "/run/spec.json"]


def test_several_nodes_need_an_address_and_even_ranks() -> None:
    argv = trainer_argv("s", 16, num_nodes=2, node_rank=1, master_addr="node0", master_port=29400)
    assert argv[argv.index("--nproc-per-node") + 1] == "8"
    assert argv[argv.index("--node-rank") + 1] == "1"
    assert "--standalone" not in argv
    with pytest.raises(ValueError, match="master_addr"):
        trainer_argv("s", 16, num_nodes=2)
    with pytest.raises(ValueError, match="not a multiple"):
        trainer_argv("s", 3, num_nodes=2, master_addr="node0", master_port=1)


def test_env_drops_an_outer_torchrun_only() -> None:
    base = {"PATH": "/bin", "RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    env = trainer_env({**base, "HF_HOME": str(Path("/hf"))}, Device.cpu)
    assert env["PATH"] == "/bin"
    assert env["HF_HOME"] == "/hf"
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & env.keys()
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert base["RANK"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in trainer_env(base, Device.cuda)
