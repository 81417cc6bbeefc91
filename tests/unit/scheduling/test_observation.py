"""What may be an observation, and how responses become one."""

from dataclasses import replace

import pytest
from length_worlds import observe

from flexfloor.scheduling.observation import by_step, observation_of
from flexfloor.types import FinishReason, Response

RESPONSE = Response(
    response_id="3/a/0",
    rollout_step=3,
    prompt_id="a",
    sample_index=0,
    prompt_token_ids=(1, 2, 3),
    token_ids=(7,) * 5,
    logprobs=(-0.1,) * 5,
    dp_rank=1,
    weight_version=4,
    finish_reason=FinishReason.length,
    cap_tokens=5,
    started_at_s=0.0,
    finished_at_s=1.0,
)


def test_a_response_becomes_an_observation() -> None:
    one = observation_of(RESPONSE, dataset="math", run_id="run", pass_index=2)
    assert (one.num_tokens, one.prompt_tokens, one.cap_tokens, one.is_truncated) == (5, 3, 5, True)
    assert (one.dataset, one.prompt_id, one.response_id, one.visit) == ("math", "a", "3/a/0", ("run", 2))
    assert (one.rollout_step, one.weight_version) == (3, 4)


def test_an_aborted_response_says_too_little() -> None:
    aborted = replace(RESPONSE, finish_reason=FinishReason.abort)
    with pytest.raises(ValueError, match="3/a/0 was aborted"):
        observation_of(aborted, dataset="math", run_id="run", pass_index=0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_tokens": -1}, "negative number"),
        ({"num_tokens": 11}, "num_tokens=11 with cap_tokens=10"),
        ({"cap_tokens": 0, "num_tokens": 0}, "cap_tokens=0"),
        ({"dataset": ""}, "without a name"),
    ],
)
def test_impossible_observations_are_refused(changes: dict[str, object], text: str) -> None:
    (one,) = observe("a", [5], cap=10)
    with pytest.raises(ValueError, match=text):
        replace(one, **changes)


def test_steps_of_two_runs_are_kept_apart() -> None:
    first = observe("a", [1, 2], step=0)
    again = observe("a", [3], step=0, run_id="other")
    assert list(by_step([*first, *again])) == [first, again]
