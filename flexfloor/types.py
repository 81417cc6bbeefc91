"""Frozen carriers that more than one room reads. No logic beyond derived properties."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FinishReason(StrEnum):
    """Why a response ended."""

    stop = "stop"
    """The model sampled an end-of-sequence or stop token."""
    length = "length"
    """A cap bound: `max_response_tokens` or the room left in the context; the response is truncated."""
    abort = "abort"
    """The engine gave the response back unfinished; it must be continued or drawn again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task as a data source yields it.

    Example: Prompt(prompt_id="9f2c...", text="97%7:", messages=None, answer="6", source="arithmetic")
    """

    prompt_id: str
    """Stable across passes and runs: the data's own id, else a content hash."""
    text: str | None
    """The prompt as plain text; exactly one of `text` and `messages` is set."""
    messages: tuple[dict[str, str], ...] | None
    """Chat messages (`role`, `content`), rendered with the tokenizer's chat template."""
    answer: str
    """Reference answer, as the reward function reads it."""
    source: str
    """Name of the data source, e.g. `arithmetic` or a reasoning-gym task."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the source's own scorer needs (JSON-able)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """One response to draw. `response_id` names it for ever; a retry carries the same one."""

    response_id: str
    """`{rollout_step}/{prompt_id}/{sample_index}`."""
    rollout_step: int
    prompt_id: str
    sample_index: int
    """0 .. num_responses_per_prompt - 1."""
    prompt_token_ids: tuple[int, ...]
    max_response_tokens: int
    sampling_seed: int
    """Own seed of this response (31 bits), so that placement does not change what is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One finished response. `len(token_ids) == len(logprobs)`."""

    response_id: str
    rollout_step: int
    prompt_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural-log probability of each sampled token under the sampling distribution at temperature 1."""
    dp_rank: int
    """Rank that served it (the last one, when it was moved)."""
    weight_version: int
    finish_reason: FinishReason
    cap_tokens: int
    """The cap that bound this response: least of `max_response_tokens` and the room left in the context."""
    started_at_s: float
    """Seconds on the driver's monotonic clock."""
    finished_at_s: float
    num_attempts: int = 1

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason is FinishReason.length

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredResponse:
    """A response with its reward."""

    response: Response
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLogprobs:
    """The trainer's own logprobs of one response, good for the weights of `weight_version` alone."""

    response_id: str
    weight_version: int
    old: tuple[float, ...] | None
    """By those weights, a value a response token; None where the step never asks for them."""
    reference: tuple[float, ...] | None
    """By the reference model; None without a KL penalty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """What the trainer needs of one response. All of `rollout_logprobs` belong to `response_token_ids`."""

    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    advantage: float
    response_id: str = ""
    """Needed where logprobs are computed ahead or given."""
    given: TrainerLogprobs | None = None
    """What the trainer computed ahead; the step takes it as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """What one server counted since its start, summed or maximised over ranks as said.

    An iteration is one forward pass of the whole EP group in which some rank has tokens; empty spins do not
    count. Ranks of a static group run every iteration together, so a step's worker-iterations are the
    difference of `num_iterations` times the group's size.
    """

    num_iterations: tuple[int, ...]
    """Per dp_rank: iterations this rank took part in, prefill and decode."""
    num_prefill_iterations: tuple[int, ...]
    num_idle_iterations: tuple[int, ...]
    """Per dp_rank: iterations in which this rank had no tokens of its own and only served its experts."""
