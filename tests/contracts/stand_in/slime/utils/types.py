"""One response."""

from dataclasses import dataclass, field
from enum import Enum


@dataclass
class Sample:
    index: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict = field(default_factory=dict)

    def append_response_tokens(
        self,
        args=None,
        *,
        tokens=None,
        log_probs=None,
        trainable=True,
        meta_info=None,
        text=None,
        update_terminal_info=True,
    ):
        tokens, log_probs = list(tokens or []), list(log_probs or [])
        if trainable and len(log_probs) != len(tokens):
            raise ValueError("every trainable token needs its log-probability")
        self.response += text or ""
        self.tokens += tokens
        self.response_length += len(tokens)
        self.loss_mask = (self.loss_mask or []) + [int(trainable)] * len(tokens)
        self.rollout_log_probs = (self.rollout_log_probs or []) + log_probs
        if meta_info is None or not update_terminal_info:
            return
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        ends = {
            "length": Sample.Status.TRUNCATED,
            "abort": Sample.Status.ABORTED,
            "stop": Sample.Status.COMPLETED,
        }
        self.status = ends[meta_info["finish_reason"]["type"]]
