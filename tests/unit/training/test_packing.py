import random

import pytest

from flexfloor.training.packing import (
    SequenceError,
    check_sequences,
    num_input_tokens,
    plan_step,
    split_minibatches,
)
from flexfloor.types import TrainSequence


def sequence(prompt: int = 2, response: int = 3, **fields: object) -> TrainSequence:
    values = {
        "prompt_token_ids": (5,) * prompt,
        "response_token_ids": (6,) * response,
        "rollout_logprobs": (-0.5,) * response,
        "advantage": 1.0,
        **fields,
    }
    return TrainSequence(**values)  # type: ignore[arg-type]


def long_tailed(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [min(400, max(2, round(30 * rng.lognormvariate(0.0, 0.8)))) for _ in range(count)]


def test_plan_by_hand() -> None:
    # Longest first to the emptier rank: 9 | 7, then 5 joins 7, 4 joins 9, 1 to rank 1 (12 < 13).
    assert plan_step([4, 9, 7, 1, 5], dp_size=2, micro_batch_tokens=10) == [
        [[1], [0]],
        [[2], [4, 3]],
    ]


def test_short_rank_gets_empty_microbatches() -> None:
    assert plan_step([50, 3], dp_size=2, micro_batch_tokens=10) == [[[0]], [[1]]]
    assert plan_step([6, 6, 6], dp_size=2, micro_batch_tokens=10) == [[[0], [2]], [[1], []]]
    assert plan_step([6], dp_size=3, micro_batch_tokens=10) == [[[0]], [[]], [[]]]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
def test_every_sequence_once_within_bounds_and_balanced(dp_size: int) -> None:
    tokens = long_tailed(200)
    plan = plan_step(tokens, dp_size, micro_batch_tokens=256)
    assert sorted(i for rank in plan for batch in rank for i in batch) == list(range(200))
    assert len({len(rank) for rank in plan}) == 1
    for batch in (batch for rank in plan for batch in rank):
        assert len(batch) <= 1 or sum(tokens[i] for i in batch) <= 256
    loads = [sum(tokens[i] for batch in rank for i in batch) for rank in plan]
    assert max(loads) - min(loads) <= min(tokens)


def test_minibatches_are_contiguous_and_even() -> None:
    assert split_minibatches(10, 3) == [range(0, 3), range(3, 6), range(6, 10)]
    assert split_minibatches(2, 4) == [range(0, 1), range(1, 2)]


def test_last_token_is_not_read() -> None:
    assert num_input_tokens(sequence(prompt=2, response=3)) == 4


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (sequence(prompt=0), "at least one token"),
        (sequence(response=0), "at least one token"),
        (sequence(prompt=14), "17 tokens exceed the context of 16"),
        (sequence(prompt_token_ids=(32,)), "outside the vocabulary of 32"),
        (sequence(response_token_ids=(-1, 1, 1)), "outside the vocabulary"),
        (sequence(rollout_logprobs=(-1.0,)), "1 rollout_logprobs for 3 response tokens"),
        (sequence(rollout_logprobs=(-1.0, float("-inf"), -1.0)), "must be finite"),
        (sequence(advantage=float("nan")), "must be finite"),
    ],
)
def test_bad_sequences_are_named(bad: TrainSequence, problem: str) -> None:
    with pytest.raises(SequenceError, match=f"sequence 1 of 2: .*{problem}"):
        check_sequences([sequence(), bad], context_tokens=16, vocab_size=32, needs_logprobs=True)


def test_demonstrations_need_no_logprobs() -> None:
    check_sequences(
        [sequence(rollout_logprobs=(), advantage=float("nan"))],
        context_tokens=16,
        vocab_size=32,
        needs_logprobs=False,
    )
    with pytest.raises(SequenceError, match="no sequences"):
        check_sequences([], context_tokens=16, vocab_size=32, needs_logprobs=False)
