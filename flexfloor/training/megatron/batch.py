"""Tensors of one microbatch: sequences packed end to end, and what the loss needs of the responses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise, repeat

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from flexfloor.types import TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Packed sequences, each without its last token, which is predicted but never read.

    `num_tokens` counts packed tokens; response tensors have `num_response_tokens` elements, sequence by
    sequence, and are empty in a microbatch that only keeps pace with the other ranks.
    """

    indices: tuple[int, ...]
    """Which sequences of the batch, in packed order."""
    response_lengths: tuple[int, ...]
    input_ids: Tensor
    """# [1, num_tokens]"""
    position_ids: Tensor
    """# [1, num_tokens]"""
    labels: Tensor
    """The token that follows each.  # [1, num_tokens]"""
    packed: PackedSeqParams
    response_places: Tensor
    """Where the response tokens are predicted.  # [num_response_tokens]"""
    weights: Tensor
    """# [num_response_tokens]"""
    advantages: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None


# What a microbatch without sequences computes on: the shortest input there is.
FILLER = TrainSequence(prompt_token_ids=(0,), response_token_ids=(0,), rollout_logprobs=(), advantage=0.0)


def build_microbatch(
    indices: Sequence[int],
    sequences: Sequence[TrainSequence],
    weights: Sequence[float],
    *,
    tokens_multiple: int,
    device: torch.device,
) -> Microbatch:
    """Pack `sequences[i] for i in indices`.

    Args:
        weights: loss weight of each token of each sequence, by index into `sequences`.
        tokens_multiple: the packed tokens are filled up to a multiple of it, as sequence parallelism needs.
    """
    chosen = [sequences[index] for index in indices] or [FILLER]
    tokens = [sequence.prompt_token_ids + sequence.response_token_ids for sequence in chosen]
    lengths = [len(ids) - 1 for ids in tokens]
    fill = -sum(lengths) % tokens_multiple
    if fill:
        tokens.append((0,) * (fill + 1))
        lengths.append(fill)
    ends = list(accumulate(lengths, initial=0))
    real = chosen if indices else []

    def row(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)[None]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Microbatch(
        indices=tuple(indices),
        response_lengths=tuple(len(sequence.response_token_ids) for sequence in real),
        input_ids=row(list(chain.from_iterable(ids[:-1] for ids in tokens))),
        position_ids=row(list(chain.from_iterable(range(length) for length in lengths))),
        labels=row(list(chain.from_iterable(ids[1:] for ids in tokens))),
        packed=_packed_params(ends, device),
        response_places=torch.tensor(_response_places(real, ends), dtype=torch.int64, device=device),
        weights=column(_per_token([weights[index] for index in indices], real)),
        advantages=column(_per_token([sequence.advantage for sequence in real], real)),
        rollout_logprobs=column(_rollout_logprobs(real)),
    )


def with_given(
    batch: Microbatch, sequences: Sequence[TrainSequence], *, needs_old: bool, needs_reference: bool
) -> Microbatch:
    """`batch` with the logprobs that its sequences were given; `check_given` has seen to it that they fit."""
    given = [logprobs for index in batch.indices if (logprobs := sequences[index].given) is not None]

    def column(values: list[tuple[float, ...] | None]) -> Tensor:
        flat = list(chain.from_iterable(part for part in values if part is not None))
        return torch.tensor(flat, dtype=torch.float32, device=batch.weights.device)

    return replace(
        batch,
        old_logprobs=column([logprobs.old for logprobs in given]) if needs_old else None,
        reference_logprobs=column([logprobs.reference for logprobs in given]) if needs_reference else None,
    )


def _response_places(sequences: Sequence[TrainSequence], ends: Sequence[int]) -> list[int]:
    places: list[int] = []
    for sequence, end in zip(sequences, ends[1:], strict=False):
        places.extend(range(end - len(sequence.response_token_ids), end))
    return places


def _per_token(values: Sequence[float], sequences: Sequence[TrainSequence]) -> list[float]:
    pairs = zip(values, sequences, strict=True)
    return list(chain.from_iterable(repeat(value, len(seq.response_token_ids)) for value, seq in pairs))


def _rollout_logprobs(sequences: Sequence[TrainSequence]) -> list[float]:
    """Demonstrations have none, and nothing reads them: zeros keep the shapes alike."""
    return list(
        chain.from_iterable(
            seq.rollout_logprobs
            if len(seq.rollout_logprobs) == len(seq.response_token_ids)
            else (0.0,) * len(seq.response_token_ids)
            for seq in sequences
        )
    )


def _packed_params(ends: list[int], device: torch.device) -> PackedSeqParams:
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    longest = max(end - start for start, end in pairwise(ends))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
