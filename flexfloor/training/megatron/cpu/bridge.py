"""mbridge classes on Megatron-Core's local layer spec, which needs no Transformer Engine."""

import dataclasses
import re
from typing import Any

from mbridge.core import LLMBridge
from mbridge.core.safetensor_io import SafeTensorIO
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp

from flexfloor.training.megatron.cpu.modules import PackedAttention, RmsNorm

CONFIG_OVERRIDES: dict[str, Any] = {
    "moe_grouped_gemm": False,
    "moe_shared_expert_overlap": False,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "use_cpu_initialization": True,
}

LOCAL_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
NORMS_IN_MLA = {
    ".self_attention.kv_layernorm.": ".self_attention.linear_kv_up_proj.layer_norm_",
    ".self_attention.q_layernorm.": ".self_attention.linear_q_up_proj.layer_norm_",
}


class CpuBridgeMixin:
    """Goes before an mbridge class, whose tables know only the parameter names of the TE layer spec."""

    config: Any
    mpu: Any
    has_vp_stage = True

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        spec = get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
        )
        spec.layer_norm = RmsNorm
        for layer in spec.layer_specs:
            _use_rms_norm(layer.submodules)
            _use_rms_norm(layer.submodules.self_attention.submodules)
            layer.submodules.self_attention.submodules.core_attention = PackedAttention
        return spec

    def _weight_name_mapping_mcore_local_to_global(
        self, model: Any, consider_ep: bool = True
    ) -> dict[str, str]:
        base: Any = super()
        names = base._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)
        routed = {name.rsplit(".router.", 1)[0] for name in names.values() if ".mlp.router." in name}
        is_mla = bool(getattr(self.config, "multi_latent_attention", False))
        offset = 0
        if consider_ep and self.mpu.ep_size > 1:
            offset = self.config.num_moe_experts // self.mpu.ep_size * self.mpu.ep_rank
        return {local: te_name(name, routed, is_mla, offset) for local, name in names.items()}

    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO:
        # mbridge's own for DeepSeek insists on bfloat16.
        return SafeTensorIO(self._get_actual_hf_path(weights_path))  # type: ignore[attr-defined]


def te_name(name: str, routed_mlps: set[str], is_mla: bool, expert_offset: int) -> str:
    """The name that the TE layer spec gives to parameter `name` of the local one.

    Args:
        routed_mlps: prefixes `decoder.layers.N.mlp` of the layers that have experts.
        is_mla: multi-latent attention, whose spec keeps its input norm apart.
        expert_offset: number of the first expert of this expert-parallel rank.
    """
    expert = LOCAL_EXPERT.search(name)
    if expert:
        number = int(expert.group(1)) + expert_offset
        return f"{name[: expert.start()]}.mlp.experts.{expert.group(2)}.weight{number}"
    if is_mla:
        for local, te in NORMS_IN_MLA.items():
            name = name.replace(local, te)
    elif name.endswith(".input_layernorm.weight"):
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    if ".pre_mlp_layernorm." in name and name.split(".pre_mlp_layernorm.")[0] + ".mlp" not in routed_mlps:
        name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
    return name


def _use_rms_norm(submodules: Any) -> None:
    for field in dataclasses.fields(submodules):
        if field.name.endswith("layernorm") and getattr(submodules, field.name) not in (IdentityOp, None):
            setattr(submodules, field.name, RmsNorm)


def cpu_bridge_class(stock: type[LLMBridge]) -> type[LLMBridge]:
    """`stock` on the local layer spec."""
    return type(f"Cpu{stock.__name__}", (CpuBridgeMixin, stock), {})
