"""A rollout step without an engine."""

from flexfloor.types import FinishReason, Response, ResponseRequest

WEIGHT_VERSION = 3


def step_of(num_prompts: int, num_responses_per_prompt: int) -> list[ResponseRequest]:
    """Responses `0/p0/0`, `0/p0/1`, ... of prompts that are one token each."""
    return [
        ResponseRequest(
            response_id=f"0/p{prompt}/{sample}",
            rollout_step=0,
            prompt_id=f"p{prompt}",
            sample_index=sample,
            prompt_token_ids=(prompt + 1,),
            max_response_tokens=16,
            sampling_seed=0,
        )
        for prompt in range(num_prompts)
        for sample in range(num_responses_per_prompt)
    ]


def response(request: ResponseRequest, num_tokens: int = 2) -> Response:
    """Its end, by the weights of WEIGHT_VERSION."""
    return Response(
        response_id=request.response_id,
        rollout_step=request.rollout_step,
        prompt_id=request.prompt_id,
        sample_index=request.sample_index,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tuple(range(num_tokens)),
        logprobs=(-0.5,) * num_tokens,
        dp_rank=0,
        weight_version=WEIGHT_VERSION,
        finish_reason=FinishReason.stop,
        cap_tokens=16,
        started_at_s=0.0,
        finished_at_s=1.0,
    )
