"""A rollout step's bounds, its progress while it runs, and its result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from flexfloor.config import TrainConfig
from flexfloor.types import Response, ResponseRequest

ENGINE_RESERVED_TOKENS = 6
"""SGLang keeps so much of the context for itself: a prefix of `context - 6` tokens is refused as too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Bounds of a step."""

    context_tokens: int
    """Prompt and response together: the least of the model's context and one rank's KV cache."""
    response_timeout_s: float
    """Longest silence of a response; before its first token, any token of its rank breaks the silence."""
    max_attempts: int
    retry_backoff_s: float = 0.5
    """Pause before the second attempt after a loss; doubles with each further one."""

    @classmethod
    def from_config(cls, config: TrainConfig) -> Self:
        rollout, context_tokens = config.rollout, config.model.context_tokens
        if rollout.kv_cache_tokens is not None:
            context_tokens = min(context_tokens, rollout.kv_cache_tokens)
        return cls(
            context_tokens=context_tokens,
            response_timeout_s=rollout.response_timeout_s,
            max_attempts=rollout.max_attempts,
        )

    def cap_tokens(self, request: ResponseRequest) -> int:
        """The cap that binds this response. Raises ValueError where the prompt leaves no room."""
        room = self.context_tokens - ENGINE_RESERVED_TOKENS - len(request.prompt_token_ids)
        if room < 1:
            raise ValueError(
                f"response {request.response_id}: {len(request.prompt_token_ids)} prompt tokens leave no "
                f"room in a context of {self.context_tokens} ({ENGINE_RESERVED_TOKENS} are reserved)"
            )
        return min(request.max_response_tokens, room)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress:
    """A running step, for a progress display."""

    num_responses: int
    num_finished: int
    num_tokens: int
    inflight: tuple[int, ...]
    """Unfinished responses per dp_rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """A finished step. Times are seconds on the driver's monotonic clock."""

    responses: tuple[Response, ...]
    """In the order of the requests."""
    started_at_s: float
    finished_at_s: float
    num_resumed: int
    """Responses that the ledger already held finished when the step (re)started."""
    num_retries: int
    """Attempts after one that was lost; moves are none."""
    num_duplicates: int
    num_late: int
    num_moves: int = 0
    """Attempts that were ended on one rank to continue on another, by order."""


class ProgressReporter:
    """Calls `on_progress` at most every `interval_s`."""

    def __init__(
        self, on_progress: Callable[[StepProgress], None], interval_s: float, clock: Callable[[], float]
    ) -> None:
        self._on_progress = on_progress
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = 0.0

    def __call__(self, make: Callable[[], StepProgress], *, is_last: bool = False) -> None:
        now_s = self._clock()
        if is_last or now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            self._on_progress(make())
