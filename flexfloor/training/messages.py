"""What travels between `TrainerClient` and rank 0 of the trainer: msgpack over a DEALER/ROUTER pair.

A request is two frames, its id and a `Request`; an answer is three frames: the id, "ok" or "error", and the
result or an `ErrorMsg`. The id lets a client drop the answer to a call that it gave up on.
"""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from flexfloor.types import TrainerLogprobs, TrainSequence

MAX_FRAME_BYTES = 4 << 30
"""Of one request or answer: a rollout step of about 200 million tokens with their logprobs."""
OK = b"ok"
ERROR = b"error"


class Objective(StrEnum):
    grpo = "grpo"
    nll = "nll"
    """Supervised: mean negative log-likelihood of all response tokens; reads nothing but tokens."""


class InfoMsg(msgspec.Struct, tag=True, frozen=True):
    pass


class TrainStepMsg(msgspec.Struct, tag=True, frozen=True):
    sequences: list[TrainSequence]
    objective: Objective
    learning_rate: float | None


class LogprobsMsg(msgspec.Struct, tag=True, frozen=True):
    sequences: list[TrainSequence]


class LogprobGroup(msgspec.Struct, frozen=True):
    """A prompt group whose responses have all finished: what logprobs are computed by.

    It is packed by itself, so its logprobs do not depend on when, or with which others, they are asked for.
    """

    sequences: list[TrainSequence]
    needs_old: bool


class GroupLogprobsMsg(msgspec.Struct, tag=True, frozen=True):
    """Refused unless the trainer's weights are those of `weight_version`."""

    weight_version: int
    needs_reference: bool
    groups: list[LogprobGroup]


class SyncWeightsMsg(msgspec.Struct, tag=True, frozen=True):
    weight_version: int
    server_url: str
    deadline_s: float


class WeightChecksumMsg(msgspec.Struct, tag=True, frozen=True):
    pass


class SaveHfMsg(msgspec.Struct, tag=True, frozen=True):
    path: str


class SaveCheckpointMsg(msgspec.Struct, tag=True, frozen=True):
    path: str


class LoadCheckpointMsg(msgspec.Struct, tag=True, frozen=True):
    path: str


class ShutdownMsg(msgspec.Struct, tag=True, frozen=True):
    pass


Request = (
    InfoMsg
    | TrainStepMsg
    | LogprobsMsg
    | GroupLogprobsMsg
    | SyncWeightsMsg
    | WeightChecksumMsg
    | SaveHfMsg
    | SaveCheckpointMsg
    | LoadCheckpointMsg
    | ShutdownMsg
)


class ErrorMsg(msgspec.Struct, frozen=True):
    is_refusal: bool
    """The caller's request was at fault and nothing was changed."""
    is_fatal: bool
    """The trainer ends because of it."""
    text: str
    traceback_tail: str
    """Last lines of the traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerInfo:
    """What a trainer that is ready says of itself."""

    num_params: int
    """Of the whole model, however it is split."""
    num_ranks: int
    dp_size: int
    context_tokens: int
    vocab_size: int
    num_steps: int
    """Optimizer steps so far, those before a loaded checkpoint included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStats:
    """One `train_step`. Means are over response tokens of all its optimizer steps, unless said otherwise."""

    loss: float
    """Mean over the optimizer steps."""
    grad_norm: float
    """Before clipping, mean over the optimizer steps."""
    clip_fraction: float
    importance_clip_fraction: float
    entropy: float
    """Estimated from the sampled tokens: mean of -logprob, nats per token."""
    kl: float
    """k3 estimate of KL to the reference model; without one, from the step's start. Nats per token."""
    mean_abs_logprob_diff: float
    """|trainer - rollout| for the weights at the start of the step, over the tokens for which it is known:
    all of them, or with importance sampling off those of the first optimizer step."""
    num_tokens: int
    """Response tokens."""
    num_optimizer_steps: int
    learning_rate: float
    seconds: float
    logprob_seconds: float
    """Part of `seconds` that went into old and reference logprobs; 0 where all were given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLogprobs:
    """The answer to a GroupLogprobsMsg."""

    logprobs: list[TrainerLogprobs]
    """Group by group, in their order."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncStats:
    seconds: float
    num_bytes: int
    weight_checksum: str
