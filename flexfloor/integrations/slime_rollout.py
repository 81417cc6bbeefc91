"""FlexFloor for slime: two functions that slime loads by name.

    --rollout-function-path flexfloor.integrations.slime_rollout.generate_rollout
    --custom-generate-function-path flexfloor.integrations.slime_rollout.generate
    --custom-config-path flexfloor.yaml        keys: see `slime_settings`

The first marks a rollout step on every server, so that ranks leave when they are done, and returns when all
are back: slime's trainer updates the engines' weights right after. Batches, rewards, filters and partial
rollouts stay slime's own. The second sends each response to the rank that FlexFloor's placement has for it,
and continues a response whose rank was lost. Each works without the other.

slime runs both in one process, the second in an event loop that the first one waits for.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flexfloor.integrations.placed_source import PlacedSource
from flexfloor.integrations.sample_lengths import SampleLengths
from flexfloor.integrations.slime_fleet import Fleet
from flexfloor.integrations.slime_settings import SlimeSettings

logger = logging.getLogger(__name__)

LOST = "flexfloor:"
"""Begin of the abort message of a response whose rank was lost."""

_lengths: SampleLengths | None = None
_source: PlacedSource | None = None
"""Of the step that runs now."""


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """slime's own rollout function, with FlexFloor's step around it.

    Raises FlexfloorError where a server refuses or a rank does not come back: a weight update would miss it.
    """
    from slime.rollout import sglang_rollout

    settings = SlimeSettings.from_args(args)
    fleet = Fleet.of(args, settings)
    try:
        with fleet.rollout(rollout_id) as figures:
            if evaluation:
                return sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation=True)
            lengths = _kept_lengths(args, settings)
            with _placing(
                PlacedSource(data_source, rollout_step=rollout_id, fleet=fleet, lengths=lengths)
            ) as source:
                output = sglang_rollout.generate_rollout(args, rollout_id, source, evaluation=False)
            lengths.end_step()
    finally:
        fleet.close()
    output.metrics = {**(output.metrics or {}), **figures}
    return output


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """slime's custom generate function, for one response of one turn of text.

    A sample with images goes through slime's own function: not placed, and not continued.
    """
    from slime.rollout import sglang_rollout

    source = None if evaluation else _source
    try:
        if any(value is not None for value in (sample.multimodal_inputs or {}).values()):
            return await sglang_rollout.generate(args, sample, sampling_params)
        return await _whole_response(args, sample, sampling_params, source)
    finally:
        if source is not None:
            source.ended(sample)


async def _whole_response(
    args: Any, sample: Any, sampling_params: dict[str, Any], source: PlacedSource | None
) -> Any:
    from slime.rollout import sglang_rollout

    state = sglang_rollout.GenerateState(args)
    seat = source.seat_of(sample) if source is not None else None
    url = seat.url if seat is not None else f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    dp_rank = seat.dp_rank if seat is not None else None
    for num_left in range(SlimeSettings.from_args(args).max_resubmits, -1, -1):
        is_lost = await _attempt(args, sample, sampling_params, f"{url}/generate", dp_rank, state.tokenizer)
        # What slime itself aborts must go back to it as it is.
        if not is_lost or num_left == 0 or state.aborted:
            break
        logger.warning(
            "sample %s lost its rank at %d tokens and goes on", sample.index, sample.response_length
        )
        sample.status = type(sample).Status.PENDING
        # Its rank is gone: the server's routing has the place.
        dp_rank = None
    return sample


async def _attempt(
    args: Any, sample: Any, sampling_params: dict[str, Any], url: str, dp_rank: int | None, tokenizer: Any
) -> bool:
    """Draw on from the tokens that the sample has. True: the rank was lost, the response has no end."""
    from slime.utils.http_utils import post

    budget = sampling_params["max_new_tokens"] - sample.response_length
    if budget <= 0:
        sample.status = type(sample).Status.TRUNCATED
        return False
    if not sample.tokens:
        sample.tokens = list(tokenizer.encode(sample.prompt, add_special_tokens=False))
    payload: dict[str, Any] = {
        "input_ids": list(sample.tokens),
        "sampling_params": {**sampling_params, "max_new_tokens": budget},
        "return_logprob": True,
    }
    if dp_rank is not None:
        payload["routed_dp_rank"] = dp_rank
    if getattr(args, "use_rollout_routing_replay", False):
        payload["return_routed_experts"] = True
    output = await post(url, payload)
    meta_info = output["meta_info"]
    drawn = meta_info.get("output_token_logprobs") or []
    sample.append_response_tokens(
        args,
        tokens=[token[1] for token in drawn],
        log_probs=[token[0] for token in drawn],
        trainable=True,
        meta_info=meta_info,
        text=output.get("text", ""),
    )
    reason = meta_info["finish_reason"]
    return reason["type"] == "abort" and str(reason.get("message") or "").startswith(LOST)


@contextmanager
def _placing(source: PlacedSource) -> Iterator[PlacedSource]:
    """`generate` finds the step's seats in here."""
    global _source
    _source = source
    try:
        yield source
    finally:
        _source = None


def _kept_lengths(args: Any, settings: SlimeSettings) -> SampleLengths:
    """One for the process: what a step taught serves the next one."""
    global _lengths
    if _lengths is None:
        _lengths = SampleLengths(
            cap_tokens=args.rollout_max_response_len,
            history=settings.history,
            dataset=settings.dataset,
            run_id=settings.run_id,
        )
    return _lengths
