"""MoE forward on a CPU: one pair of matrix products for each local expert that has tokens."""

from typing import Any

import torch
from torch.nn import functional


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
    topk = topk_ids.shape[1]
    flat_ids = topk_ids.reshape(-1)
    flat_weights = topk_weights.reshape(-1, 1)
    # A stable order makes the sum of a token's experts run in expert order, whatever the batch.
    by_expert = flat_ids.argsort(stable=True)
    num_by_expert = torch.bincount(flat_ids + 1, minlength=w13_weight.shape[0] + 1).tolist()
    combined = torch.zeros_like(x, dtype=topk_weights.dtype)
    start = num_by_expert[0]
    for expert, num_rows in enumerate(num_by_expert[1:]):
        if num_rows == 0:
            continue
        rows = by_expert[start : start + num_rows]
        start += num_rows
        tokens = rows // topk
        gate, up = functional.linear(x[tokens], w13_weight[expert]).chunk(2, dim=-1)
        expert_out = functional.linear(functional.silu(gate) * up, w2_weight[expert])
        combined.index_add_(0, tokens, expert_out.to(combined.dtype) * flat_weights[rows])
    return combined.to(x.dtype)
