"""Distributed checkpoints of weights and optimizer, which other layouts with experts split alike can load."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu

from flexfloor.training.megatron.model import TrainedModel


def save_checkpoint(model: TrainedModel, path: str, num_steps: int) -> None:
    """Collective. The folder is created; one that holds a checkpoint already is overwritten.

    Starts writer processes by spawn, which import the program's main module anew.
    """
    metadata = _metadata()
    if dist.get_rank() == 0:
        Path(path).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _sharded_state(model, metadata, is_loading=False)
    state["num_steps"] = num_steps
    dist_checkpointing.save(state, path, content_metadata=_without_groups(metadata))


def load_checkpoint(model: TrainedModel, path: str) -> int:
    """Collective. Returns the optimizer steps that lie behind the checkpoint.

    Raises:
        ValueError: `path` holds no checkpoint.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(path):
        raise ValueError(f"{path} holds no distributed checkpoint")
    loaded = dist_checkpointing.load(_sharded_state(model, _metadata(), is_loading=True), path)
    for number, chunk in enumerate(model.unwrapped):
        chunk.load_state_dict(loaded[_model_key(number)])
    model.optimizer.load_state_dict(loaded["optimizer"])
    return int(loaded["num_steps"])


def _metadata() -> dict[str, Any]:
    return {
        # The default cannot be read back with this version; this one also loads with other numbers of ranks.
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }


def _without_groups(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if not key.endswith("_group")}


def _sharded_state(model: TrainedModel, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    # Without the DDP wrapper, whose names carry a prefix that does not load back.
    state: dict[str, Any] = {}
    chunk: Any
    for number, chunk in enumerate(model.unwrapped):
        state[_model_key(number)] = chunk.sharded_state_dict(metadata=metadata)
    weights = {key: value for chunk in state.values() for key, value in chunk.items()}
    state["optimizer"] = model.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return state


def _model_key(number: int) -> str:
    return "model" if number == 0 else f"model{number}"
