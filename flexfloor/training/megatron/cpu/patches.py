"""Corrections of single functions of Megatron-Core 0.16.1 that do not hold on a CPU."""

import functools
import logging
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random as mcore_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from flexfloor.training.megatron.cpu import fake_cuda


def install() -> None:
    mcore_random._get_cuda_rng_state = fake_cuda._get_rng_state
    mcore_random._set_cuda_rng_state = fake_cuda._set_rng_state
    # It warns whenever its "GPU" generator moved the CPU's, which here are one and the same.
    logging.getLogger(mcore_random.__name__).addFilter(_is_not_rng_warning)
    # Left undefined without Transformer Engine, yet read by the fp32 router.
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
    _keep_adam_steps_apart()


def _is_not_rng_warning(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The original ignores `as_numpy` for a CPU tensor; gloo's alltoall needs the ints."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _keep_adam_steps_apart() -> None:
    """torch's Adam keeps a step tensor per parameter; Megatron-Core expects TE's Adam, which keeps none.

    Loading a checkpoint would fail for want of a "step" in it, and would leave all parameters with one shared
    step tensor, which then advances once per parameter: wrong bias corrections after every resume.
    """
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(original)
    def with_own_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            state["step"] = state["step"].clone()
            tensors.setdefault("step", state["step"])
        original(self, model_param, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = with_own_step


def prime_adam(optimizer: Any) -> None:
    """Give torch's Adam the state that it would make in its first step.

    Megatron-Core reads the step count of a parameter's state when it saves or loads a checkpoint, and fails
    where no step was taken yet, as in every process that resumes.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
