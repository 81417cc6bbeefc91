"""How to start the trainer's processes: its spec, command line and environment. Pure; starts nothing."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from flexfloor.config.schema import AlgorithmConfig, Device, Dtype, TrainerConfig

# Set by torchrun for its ranks; a launcher that itself runs under torchrun must not hand its own down.
TORCHRUN_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
TORCHRUN_NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
     "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """Everything that the trainer's processes need to know."""

    endpoint: str
    """ZeroMQ endpoint that rank 0 binds; an `ipc://` path lies in a folder that only the user can enter."""
    keys_path: str | None = None
    """File of `training.keys`, for a tcp endpoint."""
    checkpoint_path: str
    """Hugging Face checkpoint folder with the weights to start from (and the reference model, if any)."""
    device: Device
    dtype: Dtype
    context_tokens: int
    """Longest prompt plus response; never more than the model's own context is used."""
    max_response_tokens: int
    """Denominator of `LossAgg.fixed`."""
    seed: int
    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    work_dir: str
    """For what must pass through a disk, e.g. `WeightSyncPath.disk`; the engine must see the same path."""


def encode_spec(spec: TrainerSpec) -> bytes:
    """The spec as JSON."""
    return msgspec.json.encode(spec)


def decode_spec(text: bytes) -> TrainerSpec:
    """Raises msgspec.ValidationError for text that is no spec."""
    return msgspec.json.decode(text, type=TrainerSpec)


def trainer_argv(
    spec_path: str,
    num_ranks: int,
    *,
    num_nodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> list[str]:
    """Command line of this node's torchrun, which ends all ranks as soon as one fails.

    Args:
        num_ranks: of the whole trainer; a multiple of `num_nodes`.
        master_addr, master_port: where node 0 can be reached; needed when there are several nodes.

    Raises:
        ValueError: the ranks do not divide by the nodes, or several nodes have no address to meet at.
    """
    if num_ranks % num_nodes:
        raise ValueError(f"num_ranks={num_ranks} is not a multiple of num_nodes={num_nodes}")
    argv = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "0"]
    argv += ["--nproc-per-node", str(num_ranks // num_nodes), "--nnodes", str(num_nodes)]
    if num_nodes == 1:
        argv += ["--standalone"]
    elif master_addr is None or master_port is None:
        raise ValueError("several nodes need master_addr and master_port")
    else:
        argv += ["--node-rank", str(node_rank)]
        argv += ["--master-addr", master_addr, "--master-port", str(master_port)]
    return [*argv, "-m", "flexfloor.training.trainer", "--spec", spec_path]


def trainer_env(base_env: Mapping[str, str], device: Device) -> dict[str, str]:
    """Environment of torchrun and of its ranks: `base_env` without an outer torchrun's variables."""
    env = {
        name: value
        for name, value in base_env.items()
        if name not in TORCHRUN_NAMES and not name.startswith(TORCHRUN_PREFIXES)
    }
    env["PYTHONUNBUFFERED"] = "1"
    # One thread per rank: ranks share the cores, and more threads would also reorder floating-point sums.
    env["OMP_NUM_THREADS"] = "1"
    if device is Device.cpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
        # Megatron-Core's small fused functions go through torch.compile, whose C++ builds cost minutes.
        env["TORCH_COMPILE_DISABLE"] = "1"
    else:
        # Megatron-Core asserts this where tensor parallelism overlaps its communication.
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return env
