"""What a step needs computed ahead, and which logprobs it refuses."""

import math
from dataclasses import replace

import pytest

from flexfloor.config import AlgorithmConfig
from flexfloor.training.given import check_given, check_groups, in_request_order, sequences_with_old
from flexfloor.training.messages import LogprobGroup
from flexfloor.training.packing import SequenceError
from flexfloor.types import TrainerLogprobs, TrainSequence

BOTH = AlgorithmConfig(num_minibatches=2, kl_coef=0.01)
"""Old logprobs for the second half of the sequences, reference logprobs for all."""


def sequence(name: str) -> TrainSequence:
    given = TrainerLogprobs(response_id=name, weight_version=3, old=(-1.0, -2.0), reference=(-3.0, -4.0))
    return TrainSequence(
        prompt_token_ids=(1,),
        response_token_ids=(2, 3),
        rollout_logprobs=(-1.0, -2.0),
        advantage=1.0,
        response_id=name,
        given=given,
    )


SEQUENCES = [sequence(f"r{index}") for index in range(4)]


def changed(index: int, **changes: object) -> list[TrainSequence]:
    """SEQUENCES with another `given` at one place."""
    given = SEQUENCES[index].given
    assert given is not None
    other = replace(given, **changes)  # type: ignore[arg-type]
    return [replace(one, given=other) if n == index else one for n, one in enumerate(SEQUENCES)]


@pytest.mark.parametrize(
    ("algorithm", "with_old"),
    [
        (AlgorithmConfig(num_minibatches=1), range(0)),
        (AlgorithmConfig(num_minibatches=4), range(2, 10)),
        (AlgorithmConfig(num_minibatches=4, importance_cap=None), range(0)),
        # More minibatches than sequences: one each.
        (AlgorithmConfig(num_minibatches=20), range(1, 10)),
    ],
)
def test_the_first_optimizer_step_needs_no_old_logprobs(algorithm: AlgorithmConfig, with_old: range) -> None:
    assert list(sequences_with_old(10, algorithm)) == list(with_old)


@pytest.mark.parametrize(
    "sequences",
    [
        SEQUENCES,
        [replace(one, given=None) for one in SEQUENCES],
        changed(0, old=None),
        changed(1, old=(-1.0,)),
    ],
    ids=["all", "none", "no old in the first step", "nobody looks at old in the first step"],
)
def test_all_or_nothing_is_taken(sequences: list[TrainSequence]) -> None:
    check_given(sequences, weight_version=3, algorithm=BOTH)


@pytest.mark.parametrize(
    ("sequences", "text"),
    [
        ([replace(SEQUENCES[0], given=None), *SEQUENCES[1:]], "given for 3 of 4 sequences; give all"),
        (changed(1, response_id="r2"), "response 'r1' is given the logprobs of 'r2'"),
        (changed(2, weight_version=2), "'r2' is given logprobs by the weights of weight_version 2, and the "),
        (changed(2, old=None), "'r2' is given no old logprobs for 2 response tokens"),
        (changed(3, old=(-1.0,)), "'r3' is given 1 old logprobs for 2 response tokens"),
        (changed(0, reference=None), "'r0' is given no reference logprobs for 2 response tokens"),
        (changed(0, reference=(-1.0, math.nan)), "'r0' is given reference logprobs that are not finite"),
    ],
)
def test_what_does_not_fit_is_refused(sequences: list[TrainSequence], text: str) -> None:
    with pytest.raises(SequenceError, match=text):
        check_given(sequences, weight_version=3, algorithm=BOTH)


@pytest.mark.parametrize(("have", "text"), [(None, "have changed since the last sync"), (4, "are 4")])
def test_logprobs_by_other_weights_are_refused(have: int | None, text: str) -> None:
    with pytest.raises(SequenceError, match=f"weight_version 3, and the trainer's weights {text}"):
        check_given(SEQUENCES, weight_version=have, algorithm=BOTH)
    with pytest.raises(SequenceError, match=f"weight_version 3, and the trainer's weights {text}"):
        check_groups(
            [LogprobGroup(SEQUENCES, True)],
            asked_version=3,
            weight_version=have,
            needs_reference=False,
            has_reference=False,
        )


@pytest.mark.parametrize(
    ("groups", "needs_reference", "text"),
    [
        ([LogprobGroup(SEQUENCES, True)], True, "this trainer runs with kl_coef=0"),
        ([], False, "no group"),
        ([LogprobGroup([], True)], False, "no sequences"),
        ([LogprobGroup(SEQUENCES, True), LogprobGroup(SEQUENCES[:1], True)], False, "'r0' names no response"),
        ([LogprobGroup([replace(SEQUENCES[0], response_id="")], True)], False, "'' names no response"),
    ],
)
def test_groups_whose_answers_could_not_be_told_apart_are_refused(
    groups: list[LogprobGroup], needs_reference: bool, text: str
) -> None:
    with pytest.raises(SequenceError, match=text):
        check_groups(
            groups,
            asked_version=3,
            weight_version=3,
            needs_reference=needs_reference,
            has_reference=False,
        )


def test_an_answer_names_its_response_and_its_weights() -> None:
    groups = [LogprobGroup(SEQUENCES[:1], False), LogprobGroup(SEQUENCES[1:2], True)]
    assert in_request_order(groups, {1: [-1.5]}, {0: [-2.5], 1: [-3.5]}, 7) == [
        TrainerLogprobs(response_id="r0", weight_version=7, old=None, reference=(-2.5,)),
        TrainerLogprobs(response_id="r1", weight_version=7, old=(-1.5,), reference=(-3.5,)),
    ]
