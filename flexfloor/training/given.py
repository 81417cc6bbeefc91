"""Logprobs that were computed ahead: what a step needs of them, and which ones it must not take. Pure.

A step takes all that it needs from what it is given, or computes all itself. A mixture would be a mistake of
the caller's, and stale ones would train on another policy than the step's without a word.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from flexfloor.config.schema import AlgorithmConfig
from flexfloor.training.messages import LogprobGroup
from flexfloor.training.packing import SequenceError, split_minibatches
from flexfloor.types import TrainerLogprobs, TrainSequence


def sequences_with_old(num_sequences: int, algorithm: AlgorithmConfig) -> range:
    """Which sequences of a step need old logprobs of the trainer's own.

    Those of the first optimizer step have them from its forward pass, for the weights are still the old ones.
    """
    if algorithm.importance_cap is None:
        return range(0)
    first = split_minibatches(num_sequences, algorithm.num_minibatches)[0]
    return range(first.stop, num_sequences)


def check_groups(
    groups: Sequence[LogprobGroup],
    *,
    asked_version: int,
    weight_version: int | None,
    needs_reference: bool,
    has_reference: bool,
) -> None:
    """Refuse logprobs by other weights than asked for, and groups whose answers would be mixed up.

    Args:
        weight_version: of the trainer's weights; None where they have changed since the last sync.

    Raises:
        SequenceError: says what is wrong.
    """
    _check_version(asked_version, weight_version, "logprobs were asked for by")
    if needs_reference and not has_reference:
        raise SequenceError("reference logprobs were asked for, and this trainer runs with kl_coef=0")
    if not groups or not all(group.sequences for group in groups):
        raise SequenceError("a prompt group holds no sequences, or there is no group")
    names = Counter(sequence.response_id for group in groups for sequence in group.sequences)
    twins = [name for name, count in names.items() if count > 1 or not name]
    if twins:
        raise SequenceError(f"response_id {twins[0]!r} names no response, or more than one")


def check_given(
    sequences: Sequence[TrainSequence], *, weight_version: int | None, algorithm: AlgorithmConfig
) -> None:
    """Refuse a step that is given logprobs for some sequences only, of others, or by other weights.

    Raises:
        SequenceError: names the response.
    """
    given = [sequence.given for sequence in sequences if sequence.given is not None]
    if not given:
        return
    if len(given) != len(sequences):
        raise SequenceError(f"logprobs are given for {len(given)} of {len(sequences)} sequences; give all")
    with_old = sequences_with_old(len(sequences), algorithm)
    for index, (sequence, logprobs) in enumerate(zip(sequences, given, strict=True)):
        name = sequence.response_id
        if logprobs.response_id != name:
            raise SequenceError(f"response {name!r} is given the logprobs of {logprobs.response_id!r}")
        _check_version(
            logprobs.weight_version, weight_version, f"response {name!r} is given logprobs by the weights of"
        )
        _check_values(sequence, "old", logprobs.old, index in with_old)
        _check_values(sequence, "reference", logprobs.reference, bool(algorithm.kl_coef))


def in_request_order(
    groups: Sequence[LogprobGroup],
    old: dict[int, list[float]],
    reference: dict[int, list[float]],
    weight_version: int,
) -> list[TrainerLogprobs]:
    """The answer for all sequences, from values by position in the groups laid end to end."""
    sequences = chain.from_iterable(group.sequences for group in groups)
    return [
        TrainerLogprobs(
            response_id=sequence.response_id,
            weight_version=weight_version,
            old=tuple(old[index]) if index in old else None,
            reference=tuple(reference[index]) if index in reference else None,
        )
        for index, sequence in enumerate(sequences)
    ]


def _check_version(version: int, weight_version: int | None, what: str) -> None:
    if version != weight_version:
        have = "have changed since the last sync" if weight_version is None else f"are {weight_version}"
        raise SequenceError(f"{what} weight_version {version}, and the trainer's weights {have}")


def _check_values(
    sequence: TrainSequence, name: str, values: tuple[float, ...] | None, is_needed: bool
) -> None:
    if not is_needed:
        return
    if values is None or len(values) != len(sequence.response_token_ids):
        have = "no" if values is None else len(values)
        raise SequenceError(
            f"response {sequence.response_id!r} is given {have} {name} logprobs for "
            f"{len(sequence.response_token_ids)} response tokens"
        )
    if not all(map(math.isfinite, values)):
        raise SequenceError(f"response {sequence.response_id!r} is given {name} logprobs that are not finite")
