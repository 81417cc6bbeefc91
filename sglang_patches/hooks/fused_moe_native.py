"""Hooks on sglang.srt.layers.moe.fused_moe_native."""

from collections.abc import Callable
from typing import Any


def moe_forward_native(
    original: Callable[..., Any], layer: Any, x: Any, topk_output: Any, moe_runner_config: Any
) -> Any:
    """Around `moe_forward_native`: ours where it applies, else SGLang's (other activations, biases)."""
    import torch
    from sglang.srt.layers.moe.utils import should_use_dp_reduce_scatterv

    from sglang_patches.cpu import native_moe

    if not native_moe.supports(layer, moe_runner_config):
        return original(layer, x, topk_output, moe_runner_config)
    # Which experts share a rank changes with the membership. Rounded only after the sum over ranks, a token's
    # result does not change with it; the combine's own buffer has the model's dtype.
    out_dtype = torch.float32 if should_use_dp_reduce_scatterv() else x.dtype
    return native_moe.forward_local_experts(
        x, topk_output.topk_weights, topk_output.topk_ids, layer.w13_weight, layer.w2_weight, out_dtype
    )
