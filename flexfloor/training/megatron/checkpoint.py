"""Distributed checkpoints of weights and optimizer, which other layouts with experts split alike can load.

Beside them lies the state of each rank's random generators, which only the same number of ranks can take up.
Nothing in a training step draws from them today.
"""

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from flexfloor.training.megatron.model import TrainedModel

logger = logging.getLogger(__name__)


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
    torch.save(_random_state(), _random_path(path))
    # Whoever is told that it is saved finds every rank's part.
    dist.barrier()


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
    _restore_random(path)
    return int(loaded["num_steps"])


def _random_path(path: str) -> Path:
    return Path(path) / f"random-{dist.get_rank():05d}-of-{dist.get_world_size():05d}.pt"


def _random_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "megatron": dict(get_cuda_rng_tracker().get_states())}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random(path: str) -> None:
    file = _random_path(path)
    if not file.exists():
        logger.warning("%s: no random state for %d ranks; theirs is new", path, dist.get_world_size())
        return
    state = torch.load(file, map_location="cpu", weights_only=True)
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["megatron"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


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
