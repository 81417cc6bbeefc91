"""The MoE forward of a few tokens as one compiled loop: there, operator calls cost more than arithmetic.

Each (token, expert) pair is computed by itself, so a token's result does not depend on the rest of the batch.
"""

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np


def _add_local_experts(
    x: np.ndarray,
    topk_weights: np.ndarray,
    topk_ids: np.ndarray,
    w13_weight: np.ndarray,
    w2_weight: np.ndarray,
    out: np.ndarray,
) -> None:
    num_tokens, hidden = x.shape
    num_experts, _, inter = w2_weight.shape
    activated = np.empty(inter, dtype=np.float32)
    # Expert by expert, so that its weights stay in the cache for all of its tokens.
    for expert in range(num_experts):
        for token in range(num_tokens):
            for place in range(topk_ids.shape[1]):
                if topk_ids[token, place] != expert:
                    continue
                for row in range(inter):
                    gate = np.float32(0.0)
                    up = np.float32(0.0)
                    for column in range(hidden):
                        gate += w13_weight[expert, row, column] * x[token, column]
                        up += w13_weight[expert, inter + row, column] * x[token, column]
                    activated[row] = gate / (np.float32(1.0) + math.exp(-gate)) * up
                scale = topk_weights[token, place]
                for row in range(hidden):
                    total = np.float32(0.0)
                    for column in range(inter):
                        total += w2_weight[expert, row, column] * activated[column]
                    out[token, row] += scale * total


# Sums may be regrouped, which lets them be vectorised. Rows that pad a batch may hold anything, NaN too, and
# must neither raise nor be assumed away.
_FAST_BUT_NAN_SAFE = {"reassoc", "contract", "nsz", "arcp"}
_compile = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST_BUT_NAN_SAFE)

add_local_experts: Callable[..., Any] = _compile(_add_local_experts)
"""Add each token's local experts, weighted, to `out`, which begins as zeros.

All arrays are C-contiguous float32, `topk_ids` int32 or int64; id -1 is another rank's expert.
x, out: [num_tokens, hidden]; topk_weights, topk_ids: [num_tokens, topk];
w13_weight: [num_local_experts, 2 * inter, hidden] (gate rows, then up rows);
w2_weight: [num_local_experts, hidden, inter].
"""
