"""Requests and training sequences of a step: every response once, seeds of their own, order by prompt."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfloor.config.schema import AdvantageNorm, Collectives, RolloutConfig
from flexfloor.driver.batch import sampling_seed, step_requests, train_sequences
from flexfloor.driver.prompts import TokenizedPrompt
from flexfloor.types import FinishReason, Prompt, Response, ResponseRequest, TrainerLogprobs


def prompt(name: str, *token_ids: int) -> TokenizedPrompt:
    return TokenizedPrompt(
        Prompt(prompt_id=name, text=name, messages=None, answer="1", source="test"), token_ids
    )


def rollout(num_responses_per_prompt: int, num_prompt_groups: int = 2) -> RolloutConfig:
    return RolloutConfig(
        ep_size=4,
        num_prompt_groups=num_prompt_groups,
        num_responses_per_prompt=num_responses_per_prompt,
        max_prompt_tokens=8,
        max_response_tokens=16,
        collectives=Collectives.gloo,
    )


def response(request: ResponseRequest, *token_ids: int) -> Response:
    return Response(
        response_id=request.response_id,
        rollout_step=request.rollout_step,
        prompt_id=request.prompt_id,
        sample_index=request.sample_index,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=token_ids,
        logprobs=tuple(-0.5 for _ in token_ids),
        dp_rank=0,
        weight_version=0,
        finish_reason=FinishReason.stop,
        cap_tokens=16,
        started_at_s=0.0,
        finished_at_s=1.0,
    )


def test_requests_go_prompt_by_prompt_in_the_baselines_order() -> None:
    requests = step_requests(
        [prompt("a", 1), prompt("b", 2, 3)], rollout_step=7, run_seed=0, rollout=rollout(2)
    )
    assert [request.response_id for request in requests] == ["7/a/0", "7/a/1", "7/b/0", "7/b/1"]
    assert [request.prompt_token_ids for request in requests] == [(1,), (1,), (2, 3), (2, 3)]
    assert {request.max_response_tokens for request in requests} == {16}


def test_a_seed_depends_on_run_step_prompt_and_sample_only() -> None:
    first = step_requests([prompt("a", 1), prompt("b", 2)], rollout_step=0, run_seed=3, rollout=rollout(2))
    alone = step_requests([prompt("b", 2)], rollout_step=0, run_seed=3, rollout=rollout(2))
    assert first[2:] == alone
    seeds = {
        sampling_seed(run_seed, f"{step}/{name}/{sample}")
        for run_seed in range(3)
        for step in range(10)
        for name in "abc"
        for sample in range(16)
    }
    assert len(seeds) == 3 * 10 * 3 * 16
    assert all(0 <= seed < 2**31 for seed in seeds)


@given(st.integers(1, 9), st.integers(1, 7))
def test_every_response_is_requested_once(num_prompts: int, num_responses: int) -> None:
    prompts = [prompt(f"p{index}", index) for index in range(num_prompts)]
    requests = step_requests(prompts, rollout_step=0, run_seed=0, rollout=rollout(num_responses))
    counts = Counter((request.prompt_id, request.sample_index) for request in requests)
    assert len(counts) == num_prompts * num_responses
    assert set(counts.values()) == {1}


def test_sequences_follow_the_requests_and_advantages_stay_in_their_group() -> None:
    requests = step_requests([prompt("a", 1), prompt("b", 2)], rollout_step=0, run_seed=0, rollout=rollout(2))
    ended = [response(request, 5 + index) for index, request in enumerate(requests)]
    rewards = {"0/a/0": 1.0, "0/a/1": 0.0, "0/b/0": 1.0, "0/b/1": 1.0}
    sequences = train_sequences(
        requests, {item.response_id: item for item in reversed(ended)}, rewards, AdvantageNorm.group_mean
    )
    assert [sequence.response_token_ids for sequence in sequences] == [(5,), (6,), (7,), (8,)]
    assert [sequence.advantage for sequence in sequences] == [0.5, -0.5, 0.0, 0.0]
    assert [sequence.rollout_logprobs for sequence in sequences] == [(-0.5,)] * 4


def test_a_missing_response_is_an_error_not_a_shorter_batch() -> None:
    requests = step_requests([prompt("a", 1)], rollout_step=0, run_seed=0, rollout=rollout(2))
    ended = {requests[0].response_id: response(requests[0], 5)}
    with pytest.raises(KeyError, match="0/a/1"):
        train_sequences(requests, ended, {"0/a/0": 1.0}, AdvantageNorm.group_mean)


def test_logprobs_computed_ahead_go_to_their_own_response() -> None:
    requests = step_requests([prompt("a", 1)], rollout_step=0, run_seed=0, rollout=rollout(2))
    ended = {request.response_id: response(request, 5) for request in requests}
    ahead = {
        name: TrainerLogprobs(response_id=name, weight_version=0, old=(-float(index),), reference=None)
        for index, name in enumerate(reversed(list(ended)))
    }
    rewards = dict.fromkeys(ended, 1.0)
    sequences = train_sequences(requests, ended, rewards, AdvantageNorm.group_mean, ahead)
    assert [sequence.response_id for sequence in sequences] == ["0/a/0", "0/a/1"]
    assert [sequence.given for sequence in sequences] == [ahead["0/a/0"], ahead["0/a/1"]]
    assert all(
        one.given is None for one in train_sequences(requests, ended, rewards, AdvantageNorm.group_mean)
    )
    del ahead["0/a/1"]
    with pytest.raises(KeyError, match="0/a/1"):
        train_sequences(requests, ended, rewards, AdvantageNorm.group_mean, ahead)
