"""What a release policy sees of a running rollout step, and what it may order. PURE carriers.

The live rollout and the simulator fill the same view and carry out the same orders.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from flexfloor.scheduling.lengths import LengthPrediction


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningResponse:
    """An unfinished response on a rank. What it will still take is an estimate, never the truth."""

    response_id: str
    prompt_tokens: int
    generated_tokens: int
    prediction: LengthPrediction
    is_queued: bool = False
    """Waits on its rank for a place; it has no KV tokens there."""

    @property
    def context_tokens(self) -> int:
        return 0 if self.is_queued else self.prompt_tokens + self.generated_tokens

    @property
    def remaining_tokens(self) -> float:
        return self.prediction.remaining_tokens(self.generated_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A rollout step at a decision point."""

    at_s: float
    """Since the step began, on the clock that the policy's cost model prices in."""
    num_ranks: int
    """Of the full group."""
    members: tuple[int, ...]
    """dp_ranks in the group now, ascending."""
    responses: tuple[tuple[RunningResponse, ...], ...]
    """By dp_rank, `num_ranks` of them; empty for a rank that is drained or away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """End the attempt on `source` and continue the response on `target`."""

    response_id: str
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseDecision:
    """Which members leave now, what moves before, and why; an empty one says why nothing happens."""

    leavers: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()
    reason: str = ""
    """In words with the numbers, e.g. `2 of 4 ranks are drained; 180 iterations left, gain 3.1 s`."""
    predicted_gain_s: float = 0.0
    """Worker time saved less the price of wall time, as the cost model sees it."""
    predicted_stall_s: float = 0.0
    predicted_remaining_s: float = 0.0
    """How long the step is expected to go on after it."""

    @property
    def is_stay(self) -> bool:
        return not self.leavers


class ReleasePolicy(ABC):
    """One rollout step's decisions. Subclasses keep what they must between calls."""

    @abstractmethod
    def decide(self, view: GroupView) -> ReleaseDecision:
        """Called when a rank has drained and every few iterations while responses run."""

    @abstractmethod
    def observe(self, *, predicted_s: float, observed_s: float) -> None:
        """What an iteration at the size of the last view takes, as priced and as measured."""
