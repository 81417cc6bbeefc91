"""MoE forward on a CPU: a compiled loop for few tokens, a matrix product for each expert of many."""

from typing import Any

import torch
from torch.nn import functional

from sglang_patches.cpu.moe_kernel import add_local_experts

_MAX_COMPILED_PAIRS = 192
"""Above so many (token, expert) pairs, matrix products over all tokens of an expert are faster."""


def supports(layer: Any, config: Any) -> bool:
    """Whether `forward_local_experts` computes what this layer and its MoeRunnerConfig ask for."""
    has_bias = any(getattr(layer, name, None) is not None for name in ("w13_weight_bias", "w2_weight_bias"))
    return bool(
        config.activation == "silu"
        and config.gemm1_alpha is None
        and not config.apply_router_weight_on_input
        and not has_bias
    )


def forward_local_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_weight: torch.Tensor,
    w2_weight: torch.Tensor,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Weighted sum over each token's experts that are local; id -1 means that another rank has the expert.

    x: [num_tokens, hidden]; topk_weights, topk_ids: [num_tokens, topk];
    w13_weight: [num_local_experts, 2 * inter, hidden] (gate rows, then up rows);
    w2_weight: [num_local_experts, hidden, inter]. Returns [num_tokens, hidden] in `out_dtype`, which is x's
    by default; a sum that is still to be added to other ranks' should not be rounded before.
    """
    is_small = topk_ids.numel() <= _MAX_COMPILED_PAIRS
    if is_small and _is_for_kernel(x, topk_weights, w13_weight, w2_weight):
        return _forward_compiled(x, topk_weights, topk_ids, w13_weight, w2_weight)
    return _forward_grouped(x, topk_weights, topk_ids, w13_weight, w2_weight, out_dtype or x.dtype)


def _is_for_kernel(*tensors: torch.Tensor) -> bool:
    return all(tensor.dtype is torch.float32 and tensor.is_contiguous() for tensor in tensors)


def _forward_compiled(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_weight: torch.Tensor,
    w2_weight: torch.Tensor,
) -> torch.Tensor:
    out = torch.zeros_like(x)
    tensors = (x, topk_weights, topk_ids.contiguous(), w13_weight, w2_weight, out)
    add_local_experts(*(tensor.detach().numpy() for tensor in tensors))
    return out


def _forward_grouped(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_weight: torch.Tensor,
    w2_weight: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Two matrix products for each local expert that has tokens; all else once for all experts."""
    flat_ids = topk_ids.reshape(-1)
    num_by_expert = torch.bincount(flat_ids + 1, minlength=w13_weight.shape[0] + 1).tolist()
    # A stable order makes the sum of a token's experts run in expert order, whatever the batch.
    by_expert = flat_ids.argsort(stable=True)[num_by_expert[0] :]
    tokens = by_expert // topk_ids.shape[1]
    rows = x[tokens]
    gate_up = rows.new_empty(rows.shape[0], w13_weight.shape[1])
    _multiply_by_expert(rows, w13_weight, num_by_expert[1:], gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    _multiply_by_expert(functional.silu(gate).mul_(up), w2_weight, num_by_expert[1:], rows)
    scaled = rows.to(topk_weights.dtype).mul_(topk_weights.reshape(-1, 1)[by_expert])
    return torch.zeros_like(x, dtype=scaled.dtype).index_add_(0, tokens, scaled).to(out_dtype)


def _multiply_by_expert(
    rows: torch.Tensor, weight: torch.Tensor, num_by_expert: list[int], out: torch.Tensor
) -> None:
    """out = rows @ weight[expert].T, where the first num_by_expert[0] rows are expert 0's, and so on."""
    start = 0
    for expert, num_rows in enumerate(num_by_expert):
        if num_rows:
            part = slice(start, start + num_rows)
            torch.mm(rows[part], weight[expert].t(), out=out[part])
            start += num_rows
