"""Process groups, model, gradient buffers and optimizer: Megatron-Core's own, put together for one spec."""

import contextlib
import datetime
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mbridge.core import LLMBridge
from mbridge.core.util import unwrap_model
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import get_model_config

from flexfloor.config.schema import Device, Dtype
from flexfloor.training.launch import TrainerSpec
from flexfloor.training.megatron.bridge import TORCH_DTYPES, build_bridge, load_hf_config
from flexfloor.training.megatron.cpu.fake_cuda import CudaIsCpu
from flexfloor.training.megatron.cpu.patches import prime_adam

# A collective in a training step that lasts longer than this has lost a rank.
COMPUTE_TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(slots=True)
class TrainedModel:
    """One rank's share of the model and what trains it."""

    bridge: LLMBridge
    hf_config: Any
    chunks: list[torch.nn.Module]
    """Wrapped in Megatron-Core's DDP."""
    optimizer: Any
    device: torch.device

    @property
    def unwrapped(self) -> list[torch.nn.Module]:
        chunks: list[torch.nn.Module] = unwrap_model(self.chunks)
        return chunks


def device_context(device: Device) -> AbstractContextManager[Any]:
    """Megatron-Core's code runs inside it: on a CPU it turns requests for CUDA tensors into CPU ones."""
    return CudaIsCpu() if device is Device.cpu else contextlib.nullcontext()


def init_parallel(spec: TrainerSpec) -> None:
    """Join the trainer's process group and cut it into Megatron-Core's parallel groups."""
    sizes = spec.trainer
    if spec.device is Device.cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="gloo" if spec.device is Device.cpu else "nccl", timeout=COMPUTE_TIMEOUT)
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp_size,
        pipeline_model_parallel_size=sizes.pp_size,
        expert_model_parallel_size=sizes.ep_size,
        expert_tensor_parallel_size=sizes.expert_tp_size,
    )
    model_parallel_cuda_manual_seed(spec.seed)
    torch.manual_seed(spec.seed)


def build_model(spec: TrainerSpec) -> TrainedModel:
    """Load the checkpoint into this rank's share of the model and build the optimizer on it."""
    hf_config = load_hf_config(spec.checkpoint_path)
    bridge = build_bridge(hf_config, spec.dtype, spec.device, spec.trainer)
    chunks = bridge.get_model(
        wrap_with_ddp=True,
        bf16=spec.dtype is Dtype.bfloat16,
        data_parallel_random_init=False,
        ddp_config={
            "grad_reduce_in_fp32": True,
            "use_distributed_optimizer": spec.trainer.distributed_optimizer,
        },
    )
    # Before the optimizer, which copies the weights where they are not float32.
    bridge.load_weights(unwrap_model(chunks), spec.checkpoint_path)
    get_model_config(chunks[0]).finalize_model_grads_func = finalize_model_grads
    device = torch.device("cpu")
    if spec.device is Device.cuda:
        device = torch.device("cuda", torch.cuda.current_device())
    return TrainedModel(bridge, hf_config, chunks, _build_optimizer(spec, chunks), device)


def _build_optimizer(spec: TrainerSpec, chunks: list[torch.nn.Module]) -> Any:
    trainer = spec.trainer
    config = OptimizerConfig(
        optimizer="adam",
        lr=trainer.learning_rate,
        weight_decay=trainer.weight_decay,
        adam_beta1=trainer.adam_beta1,
        adam_beta2=trainer.adam_beta2,
        clip_grad=trainer.max_grad_norm,
        bf16=spec.dtype is Dtype.bfloat16,
        params_dtype=TORCH_DTYPES[spec.dtype],
        use_distributed_optimizer=trainer.distributed_optimizer,
        optimizer_cpu_offload=trainer.optimizer_offload,
        optimizer_offload_fraction=1.0 if trainer.optimizer_offload else 0.0,
    )
    optimizer = get_megatron_optimizer(config, chunks)
    if spec.device is Device.cpu:
        prime_adam(optimizer)
    return optimizer


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_mult", 1.0)
