"""From prompts to requests and from scored responses to training sequences. Pure."""

import hashlib
from collections.abc import Mapping, Sequence

from flexfloor.config.schema import AdvantageNorm, RolloutConfig
from flexfloor.driver.prompts import TokenizedPrompt
from flexfloor.training.advantages import group_advantages
from flexfloor.types import Response, ResponseRequest, TrainerLogprobs, TrainSequence


def sampling_seed(run_seed: int, response_id: str) -> int:
    """31 bits from a hash of run and response: independent of placement, order and the other responses."""
    digest = hashlib.sha256(f"{run_seed}/{response_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def step_requests(
    prompts: Sequence[TokenizedPrompt], *, rollout_step: int, run_seed: int, rollout: RolloutConfig
) -> list[ResponseRequest]:
    """All responses of a step, prompt by prompt: p0s0, p0s1, ..., p1s0, ... (the baseline's order)."""
    return [
        _request(item, rollout_step, sample_index, run_seed, rollout)
        for item in prompts
        for sample_index in range(rollout.num_responses_per_prompt)
    ]


def _request(
    item: TokenizedPrompt, rollout_step: int, sample_index: int, run_seed: int, rollout: RolloutConfig
) -> ResponseRequest:
    response_id = f"{rollout_step}/{item.prompt.prompt_id}/{sample_index}"
    return ResponseRequest(
        response_id=response_id,
        rollout_step=rollout_step,
        prompt_id=item.prompt.prompt_id,
        sample_index=sample_index,
        prompt_token_ids=item.token_ids,
        max_response_tokens=rollout.max_response_tokens,
        sampling_seed=sampling_seed(run_seed, response_id),
    )


def train_sequences(
    requests: Sequence[ResponseRequest],
    responses: Mapping[str, Response],
    rewards: Mapping[str, float],
    norm: AdvantageNorm,
    given: Mapping[str, TrainerLogprobs] | None = None,
) -> list[TrainSequence]:
    """Training sequences in request order, whatever order the responses ended in.

    `responses`, `rewards` and `given`, logprobs that were computed ahead, are keyed by response_id and must
    be complete: a step with a response missing would favour the short ones.
    """
    groups: dict[str, list[str]] = {}
    for request in requests:
        groups.setdefault(request.prompt_id, []).append(request.response_id)
    advantages: dict[str, float] = {}
    for response_ids in groups.values():
        values = group_advantages([rewards[response_id] for response_id in response_ids], norm)
        advantages.update(zip(response_ids, values, strict=True))
    names = [request.response_id for request in requests]
    return [
        _sequence(responses[name], advantages[name], None if given is None else given[name]) for name in names
    ]


def _sequence(response: Response, advantage: float, given: TrainerLogprobs | None) -> TrainSequence:
    return TrainSequence(
        prompt_token_ids=response.prompt_token_ids,
        response_token_ids=response.token_ids,
        rollout_logprobs=response.logprobs,
        advantage=advantage,
        response_id=response.response_id,
        given=given,
    )
