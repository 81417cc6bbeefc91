"""The quickstart's task: references, scorer, demonstrations."""

import statistics

import pytest

from flexfloor.data.arithmetic import (
    EOS,
    TOKEN_IDS,
    arithmetic_prompts,
    chain,
    demonstrations,
    reference_response,
    score,
)
from flexfloor.types import Prompt


def prompt_for(dividend: int, divisor: int) -> Prompt:
    prompts = arithmetic_prompts(760, seed=0)
    return next(prompt for prompt in prompts if prompt.text == f"{dividend}%{divisor}:")


@pytest.mark.parametrize(
    ("dividend", "divisor", "response"),
    [(20, 7, "13,6."), (97, 50, "47."), (14, 7, "7,0."), (5, 9, "5."), (5, 5, "0.")],
)
def test_reference_is_the_chain_of_subtractions(dividend: int, divisor: int, response: str) -> None:
    assert reference_response(dividend, divisor) == response
    assert chain(dividend, divisor)[-1] == dividend % divisor


def test_prompts_are_distinct_seeded_and_all_of_them_at_most() -> None:
    everything = arithmetic_prompts(760, seed=1)
    assert len({prompt.text for prompt in everything}) == 760
    assert len({prompt.prompt_id for prompt in everything}) == 760
    assert arithmetic_prompts(50, seed=1) == everything[:50]
    assert arithmetic_prompts(50, seed=2) != everything[:50]


@pytest.mark.parametrize("num_prompts", [128, 256, 760])
def test_reference_lengths_are_long_tailed(num_prompts: int) -> None:
    lengths = sorted(len(prompt.answer) + 1 for prompt in arithmetic_prompts(num_prompts, seed=0))
    assert statistics.quantiles(lengths, n=100)[98] / statistics.median(lengths) >= 4
    assert max(lengths) <= 143


def test_scorer_takes_the_reference_and_nothing_near_it() -> None:
    prompt = prompt_for(30, 7)
    assert score(prompt, "23,16,9,2.") == 1.0
    near = ["2.", "23,16,9,2", "23,16,9,2.,", "23,16,9.", "23,16,10,2.", "23, 16,9,2.", "23,16,9,2..", ""]
    assert [score(prompt, text) for text in near] == [0.0] * len(near)


def decoded(token_ids: list[int]) -> str:
    characters = {token_id: token for token, token_id in TOKEN_IDS.items()}
    assert characters[token_ids[-1]] == EOS
    return "".join(characters[token_id] for token_id in token_ids[:-1])


def decoded_demonstrations(num: int, corrupt_share: float) -> list[tuple[int, int, str]]:
    """(dividend, divisor, response text) of each demonstration."""
    result = []
    for prompt_ids, response_ids in demonstrations(num, seed=3, corrupt_share=corrupt_share):
        question = decoded([*prompt_ids, TOKEN_IDS[EOS]])
        dividend, divisor = question.removesuffix(":").split("%")
        result.append((int(dividend), int(divisor), decoded(response_ids)))
    return result


def test_demonstrations_without_corruption_are_the_references() -> None:
    assert all(text == reference_response(a, b) for a, b, text in decoded_demonstrations(500, 0.0))


def test_each_step_is_corrupted_with_the_given_share() -> None:
    demos = decoded_demonstrations(4000, 0.08)
    num_exact = sum(text == reference_response(a, b) for a, b, text in demos)
    # A chain survives if each of its steps does; four standard errors of 4000 draws are 0.03.
    expected = statistics.mean((1 - 0.08) ** len(chain(a, b)) for a, b, _ in demos)
    assert num_exact / 4000 == pytest.approx(expected, abs=0.03)


def test_corrupted_steps_are_near_misses_or_early_ends() -> None:
    num_early, num_off = 0, 0
    for a, b, text in decoded_demonstrations(2000, 0.08):
        assert text.endswith(".")
        previous = a
        for value in map(int, text[:-1].split(",")):
            right = previous - b if previous >= b else previous
            assert value >= 0
            assert abs(value - right) <= 2
            num_off += value != right
            previous = value
        num_early += previous >= b
    assert num_early > 100
    assert num_off > 300


def test_demonstrations_are_seeded_and_checked() -> None:
    assert demonstrations(20, seed=1) == demonstrations(20, seed=1)
    assert demonstrations(20, seed=1) != demonstrations(20, seed=2)
    with pytest.raises(ValueError, match=r"corrupt_share=1\.5: not a share\. Fix: "):
        demonstrations(1, seed=0, corrupt_share=1.5)
