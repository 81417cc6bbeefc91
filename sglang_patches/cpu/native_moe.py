"""MoE forward on a CPU, with few operator calls: on small batches these cost more than the arithmetic."""

from typing import Any

import torch
from torch.nn import functional

_MAX_DENSE_PRODUCTS = 8 << 20
"""Up to so many products (tokens x experts x weights of one), doing all is faster than picking out few."""


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
) -> torch.Tensor:
    """Weighted sum over each token's experts that are local; id -1 means that another rank has the expert.

    x: [num_tokens, hidden]; topk_weights, topk_ids: [num_tokens, topk];
    w13_weight: [num_local_experts, 2 * inter, hidden] (gate rows, then up rows);
    w2_weight: [num_local_experts, hidden, inter]. Returns [num_tokens, hidden] in x's dtype.
    """
    num_products = x.shape[0] * (w13_weight.numel() + w2_weight.numel())
    is_small = num_products <= _MAX_DENSE_PRODUCTS and x.dtype is torch.float32
    forward = _forward_dense if is_small else _forward_grouped
    return forward(x, topk_weights, topk_ids, w13_weight, w2_weight)


def _forward_dense(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_weight: torch.Tensor,
    w2_weight: torch.Tensor,
) -> torch.Tensor:
    """Every local expert on every token; the weights of experts that a token did not choose are zero."""
    num_experts, num_gate_up, hidden = w13_weight.shape
    # Column 0 takes what belongs to other ranks.
    scales = topk_weights.new_zeros(x.shape[0], num_experts + 1)
    scales.scatter_(1, topk_ids.to(torch.int64) + 1, topk_weights)
    gate_up = functional.linear(x, w13_weight.reshape(-1, hidden)).view(-1, num_experts, num_gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    expert_in = functional.silu(gate).mul_(up).transpose(0, 1)
    expert_out = torch.bmm(expert_in, w2_weight.transpose(1, 2))
    return expert_out.mul_(scales[:, 1:].t().unsqueeze(-1)).sum(0).to(x.dtype)


def _forward_grouped(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_weight: torch.Tensor,
    w2_weight: torch.Tensor,
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
    return torch.zeros_like(x, dtype=scaled.dtype).index_add_(0, tokens, scaled).to(x.dtype)


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
