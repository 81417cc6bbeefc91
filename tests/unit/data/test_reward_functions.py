"""Built-in rewards, and what is refused before a process starts."""

from typing import Any

import pytest

from flexfloor.data.reward_worker import score
from flexfloor.data.rewards import RewardSpec, check_reward, resolve_reward
from flexfloor.errors import ConfigError
from flexfloor.types import Prompt


def rewarded(name: str, answer: str, response_text: str, **options: Any) -> float:
    prompt = Prompt(prompt_id="p", text="q", messages=None, answer=answer, source="s")
    return resolve_reward(RewardSpec(name=name, options=options))(prompt, response_text)


def test_exact_ignores_surrounding_white_space_only() -> None:
    assert rewarded("exact", "six", " six\n") == 1.0
    assert [rewarded("exact", "six", text) for text in ("Six", "six.", "", "si x")] == [0.0] * 4


def test_regex_compares_the_last_match_with_the_answer() -> None:
    pattern = r"####\s*(-?\d+)"
    assert rewarded("regex", "6", "#### 5 no, #### 6", pattern=pattern) == 1.0
    assert rewarded("regex", "5", "#### 5 no, #### 6", pattern=pattern) == 0.0
    assert rewarded("regex", "6", "six", pattern=pattern) == 0.0


def test_regex_spans_lines_and_an_empty_answer_needs_a_match() -> None:
    assert rewarded("regex", "a\nb", "<x>a\nb</x>", pattern="<x>(.*?)</x>") == 1.0
    assert rewarded("regex", "", "no tag", pattern="<x>(.*?)</x>") == 0.0


@pytest.mark.parametrize(
    ("answer", "response_text", "reward"),
    [
        ("1/2", r"so it is $\frac{2}{4}$", 1.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        ("6", "The answer is 6.", 1.0),
        ("6", "The answer is 7.", 0.0),
        ("6", "no idea", 0.0),
    ],
)
def test_math_verify_compares_values(answer: str, response_text: str, reward: float) -> None:
    assert rewarded("math_verify", answer, response_text) == reward


def test_math_verify_refuses_an_answer_that_is_no_mathematics() -> None:
    with pytest.raises(ValueError, match=r"finds no expression in the answer ''"):
        rewarded("math_verify", "", "6")


def test_a_function_by_name_gets_its_options() -> None:
    assert rewarded("sample_rewards:length", "a", "four") == 4.0
    assert rewarded("sample_rewards:length", "a", "four", scale=0.5) == 2.0


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("exakt", {}, "data.reward='exakt': unknown reward. Fix: use one of exact, regex, math_verify"),
        ("module:", {}, "unknown reward"),
        ("no_such_module:f", {}, "cannot import no_such_module"),
        ("sample_rewards:absent", {}, "module sample_rewards has no 'absent'. Fix: define absent(prompt"),
        ("sample_rewards:not_a_function", {}, "has a non-callable 'not_a_function'"),
        ("sample_rewards:needs_more", {}, "missing a required argument: 'threshold'"),
        ("sample_rewards:length", {"scales": 1}, "got an unexpected keyword argument 'scales'"),
        ("__main__:f", {}, "a worker cannot import __main__. Fix: put the function in a module"),
        ("exact", {"pattern": "x"}, "cannot be called with options {'pattern': 'x'}"),
        ("regex", {}, "missing a required argument: 'pattern'"),
        ("regex", {"pattern": "("}, "data.reward_options.pattern='(': not a regular expression"),
        ("regex", {"pattern": "x+"}, "data.reward_options.pattern='x+': has no group. Fix: write"),
        ("reasoning_gym", {"pattern": "x"}, "data.reward_options.pattern='x': has no group"),
    ],
)
def test_what_could_not_run_is_refused_with_key_value_and_fix(
    name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_reward(RewardSpec(name=name, options=options))
    assert said in str(caught.value)
    assert ". Fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "returned NoneType None, not a float"),
        ("1", "returned str '1', not a float"),
        (True, "returned bool True, not a float"),
        (float("inf"), "returned inf, which is not finite"),
    ],
)
def test_a_result_that_is_no_reward_is_a_failure(returned: Any, said: str) -> None:
    prompt = Prompt(prompt_id="p", text="q", messages=None, answer="a", source="s")
    assert score(lambda prompt, text: returned, prompt, "") == ("failed", said)


def test_whole_numbers_and_numpy_floats_are_rewards() -> None:
    numpy = pytest.importorskip("numpy")
    prompt = Prompt(prompt_id="p", text="q", messages=None, answer="a", source="s")
    for value in (1, numpy.float32(1.0), numpy.int64(1)):
        assert score(lambda prompt, text, value=value: value, prompt, "") == ("score", 1.0)  # type: ignore[misc]
