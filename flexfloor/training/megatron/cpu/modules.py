"""Torch counterparts of modules that Megatron-Core has as CUDA kernels only."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Sequences are padded to a multiple of this, so that few distinct lengths, hence few calls, remain.
LENGTH_STEP_TOKENS = 16


class RmsNorm(torch.nn.RMSNorm):
    """RMSNorm that also serves sequence parallelism, which Megatron-Core's own wrapper refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        # Its gradient is then summed over the tensor-parallel ranks, each of which saw a part of the tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class PaddedBlocks:
    """How packed sequences are cut into padded blocks of like length, and put together again."""

    sources: list[Tensor]
    """Per block, the packed token at each place; padding repeats the last.  # [num_sequences, length]"""
    is_real: list[Tensor]
    """Per block, whether a place is no padding.  # [num_sequences, length]"""
    packed_order: Tensor
    """Where each packed token stands in the concatenation of the blocks' real places.  # [num_tokens]"""


def padded_blocks(cu_seqlens: list[int]) -> PaddedBlocks:
    """Group sequences by their length, rounded up to LENGTH_STEP_TOKENS."""
    by_length: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(cu_seqlens):
        if end > start:
            length = -(-(end - start) // LENGTH_STEP_TOKENS) * LENGTH_STEP_TOKENS
            by_length.setdefault(length, []).append((start, end))
    sources, is_real = [], []
    for length, spans in sorted(by_length.items()):
        starts, ends = torch.tensor(spans).unbind(1)
        places = starts[:, None] + torch.arange(length)
        sources.append(torch.minimum(places, ends[:, None] - 1))
        is_real.append(places < ends[:, None])
    order = torch.cat([source[real] for source, real in zip(sources, is_real, strict=True)])
    return PaddedBlocks(sources, is_real, order.argsort())


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention over packed sequences (THD) by torch's own kernel.

    Megatron-Core's local DotProductAttention refuses packed sequences. Sequences of like length are padded
    and computed together; padding stands after a sequence's end, where causality hides it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert not attention_dropout, "attention dropout is not supported on a CPU"
        assert not config.attention_dropout, "attention dropout is not supported on a CPU"
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query `# [num_tokens, num_heads, head_dim]`, key and value with their own number of heads;
        returns `# [num_tokens, num_heads * head_dim]`.
        """
        assert packed_seq_params is not None, "only packed sequences are supported on a CPU"
        blocks = getattr(packed_seq_params, "blocks", None)
        if blocks is None:
            blocks = padded_blocks(packed_seq_params.cu_seqlens_q.tolist())
            # Every layer, and recomputation, asks for the same blocks.
            packed_seq_params.blocks = blocks
        pieces = []
        for source, is_real in zip(blocks.sources, blocks.is_real, strict=True):
            block = scaled_dot_product_attention(
                query[source].transpose(1, 2),
                key[source].transpose(1, 2),
                value[source].transpose(1, 2),
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=True,
            )
            pieces.append(block.transpose(1, 2).flatten(2)[is_real])
        return torch.cat(pieces)[blocks.packed_order]

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}
