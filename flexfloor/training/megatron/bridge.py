"""Hugging Face checkpoint <-> Megatron-Core parameters, by mbridge with the corrections it needs."""

from collections.abc import Iterator
from typing import Any

import torch
from mbridge.core import LLMBridge
from mbridge.core import bridge as mbridge_bridge
from transformers import AutoConfig

from flexfloor.config.schema import Device, Dtype, TrainerConfig
from flexfloor.errors import ConfigError
from flexfloor.training.megatron.cpu import bridge as cpu_bridge

# Round trip and logprobs were compared with transformers for these (float32, local layer spec); mbridge knows
# more model types, each with traps of its own.
CHECKED_MODEL_TYPES = ("qwen3_moe", "qwen2_moe", "mixtral", "qwen3", "llama")

TORCH_DTYPES = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16}


def load_hf_config(path: str) -> Any:
    """The checkpoint's configuration, with two attributes that mbridge reads and transformers 5 moved."""
    config = AutoConfig.from_pretrained(path)
    config.rope_theta = config.rope_parameters["rope_theta"]
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def build_bridge(hf_config: Any, dtype: Dtype, device: Device, trainer: TrainerConfig) -> LLMBridge:
    """The bridge for `hf_config.model_type`; model parallelism must be initialised.

    Raises:
        ConfigError: a model type that was never checked, or a layout that the local layer spec cannot take.
    """
    model_type = hf_config.model_type
    if model_type not in CHECKED_MODEL_TYPES:
        fix = f"use one of {', '.join(CHECKED_MODEL_TYPES)}, or add and check the new type"
        raise ConfigError("model.path", model_type, "this model type was never checked with the trainer", fix)
    if device is Device.cpu and trainer.expert_tp_size != trainer.tp_size:
        raise ConfigError(
            "trainer.expert_tp_size", trainer.expert_tp_size, "on a CPU experts split like the other layers",
            f"set it to trainer.tp_size={trainer.tp_size}",
        )  # fmt: skip
    bridge_class = mbridge_bridge._MODEL_REGISTRY[model_type]
    if device is Device.cpu:
        bridge_class = cpu_bridge.cpu_bridge_class(bridge_class)
    bridge = bridge_class(hf_config, dtype=TORCH_DTYPES[dtype])
    bridge.set_extra_args(**_config_overrides(hf_config, device, trainer))
    if trainer.pp_size == 1:
        # Exporting sends every weight and its name around the pipeline, four object collectives each, even
        # where the pipeline has one stage.
        mbridge_bridge.broadcast_from_megatron_pp = _as_it_is
        mbridge_bridge.broadcast_str_from_megatron_pp = _as_it_is
    return bridge


def _as_it_is(value: Any) -> Any:
    return value


def _config_overrides(hf_config: Any, device: Device, trainer: TrainerConfig) -> dict[str, Any]:
    overrides: dict[str, Any] = {
        # The loss is a sum whose weights already hold the normaliser; it must not be divided by ranks and
        # microbatches. Read when DDP is built, so it cannot be set later.
        "calculate_per_token_loss": True,
        **_router_overrides(hf_config),
    }
    if trainer.recompute:
        overrides |= {
            "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
        }  # fmt: skip
    if device is Device.cpu:
        overrides |= cpu_bridge.CONFIG_OVERRIDES
    return overrides


def _router_overrides(hf_config: Any) -> dict[str, Any]:
    """mbridge fixes one order of softmax and top-k per model type; transformers reads it from the config.

    Renormalised top-k of a softmax equals the softmax of the top-k, hence `not norm_topk_prob`.
    """
    if hf_config.model_type == "mixtral":
        return {"moe_router_pre_softmax": False, "moe_router_dtype": "fp32"}
    if hf_config.model_type not in ("qwen3_moe", "qwen2_moe"):
        return {}
    overrides = {"moe_router_pre_softmax": not hf_config.norm_topk_prob, "moe_router_dtype": "fp32"}
    if hf_config.model_type == "qwen2_moe":
        overrides["moe_shared_expert_gate"] = True
    return overrides


def export_hf_weights(bridge: LLMBridge, model: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight under its Hugging Face name, whole, on the model's device.

    Collective: all ranks must run it to its end together, and all get every weight. The order depends on the
    parallel layout. A tensor may share the model's memory and is valid until the weights change.
    """
    seen: set[str] = set()
    for name, tensor in bridge.export_weights(model):
        # With tied embeddings and several pipeline stages the first and the last stage hold the same weight.
        if name not in seen:
            seen.add(name)
            yield name, tensor.detach()
