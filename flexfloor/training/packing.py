"""Which sequence trains in which optimizer step, on which data-parallel rank, in which microbatch. Pure.

Every rank computes the same plan from the same sequences, so nothing but the sequences is sent.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from flexfloor.types import TrainSequence


class SequenceError(ValueError):
    """A sequence or batch that cannot be trained; refused before any rank starts to compute."""


def num_input_tokens(sequence: TrainSequence) -> int:
    """Tokens the model reads: all but the last, which is only predicted."""
    return len(sequence.prompt_token_ids) + len(sequence.response_token_ids) - 1


def split_minibatches(num_sequences: int, num_minibatches: int) -> list[range]:
    """Indices of each optimizer step: contiguous blocks whose sizes differ by one at most.

    Contiguous, because the driver hands over prompt groups one after the other and a group should stay
    together. No block is empty: a batch smaller than `num_minibatches` gives fewer steps.
    """
    num_blocks = min(num_minibatches, num_sequences)
    edges = [num_sequences * block // num_blocks for block in range(num_blocks + 1)]
    return [range(start, end) for start, end in pairwise(edges)]


def deal_to_ranks(num_tokens: Sequence[int], dp_size: int) -> list[list[int]]:
    """Indices of the sequences of each data-parallel rank, longest first, balanced by tokens.

    Greedy: the next longest goes to the rank with the fewest tokens, the lowest rank on a tie.
    """
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    loads = [0] * dp_size
    for index in sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i)):
        rank = loads.index(min(loads))
        ranks[rank].append(index)
        loads[rank] += num_tokens[index]
    return ranks


def pack_microbatches(
    indices: Sequence[int], num_tokens: Sequence[int], micro_batch_tokens: int
) -> list[list[int]]:
    """Cut the sequences of one rank, in their order, into microbatches of at most `micro_batch_tokens`.

    A sequence longer than that is a microbatch of its own. Sequences come longest first, so those of one
    microbatch are of like length, which is what padded attention wants.
    """
    microbatches: list[list[int]] = []
    room = 0
    for index in indices:
        if not microbatches or num_tokens[index] > room:
            microbatches.append([])
            room = micro_batch_tokens
        microbatches[-1].append(index)
        room -= num_tokens[index]
    return microbatches


def plan_step(num_tokens: Sequence[int], dp_size: int, micro_batch_tokens: int) -> list[list[list[int]]]:
    """Microbatches of every data-parallel rank: `plan[dp_rank][microbatch]` is a list of sequence indices.

    All ranks get the same number, since expert-parallel ranks run every microbatch together; an empty list
    stands for a microbatch that computes and counts for nothing.
    """
    dealt = deal_to_ranks(num_tokens, dp_size)
    plan = [pack_microbatches(indices, num_tokens, micro_batch_tokens) for indices in dealt]
    most = max(len(microbatches) for microbatches in plan)
    return [microbatches + [[]] * (most - len(microbatches)) for microbatches in plan]


def check_sequences(
    sequences: Sequence[TrainSequence], *, context_tokens: int, vocab_size: int, needs_logprobs: bool
) -> None:
    """Refuse what would fail, or train on nonsense, in the middle of a collective computation.

    Raises:
        SequenceError: names the sequence and the problem.
    """
    if not sequences:
        raise SequenceError("the batch holds no sequences")
    for index, sequence in enumerate(sequences):
        problem = _problem(sequence, context_tokens, vocab_size, needs_logprobs)
        if problem:
            raise SequenceError(f"sequence {index} of {len(sequences)}: {problem}")


def _problem(
    sequence: TrainSequence, context_tokens: int, vocab_size: int, needs_logprobs: bool
) -> str | None:
    prompt, response = sequence.prompt_token_ids, sequence.response_token_ids
    if not prompt or not response:
        return "prompt and response need at least one token each"
    if len(prompt) + len(response) > context_tokens:
        return f"{len(prompt) + len(response)} tokens exceed the context of {context_tokens} tokens"
    if min(min(prompt), min(response)) < 0 or max(max(prompt), max(response)) >= vocab_size:
        return f"a token id lies outside the vocabulary of {vocab_size}"
    if not needs_logprobs:
        return None
    if len(sequence.rollout_logprobs) != len(response):
        return f"{len(sequence.rollout_logprobs)} rollout_logprobs for {len(response)} response tokens"
    if not math.isfinite(sequence.advantage) or not all(map(math.isfinite, sequence.rollout_logprobs)):
        return "advantage and rollout_logprobs must be finite"
    return None
