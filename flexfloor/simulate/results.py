"""What a simulated run took. PURE."""

from collections.abc import Sequence
from dataclasses import dataclass

from flexfloor.simulate.engine import DecisionFact


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One rollout step; seconds are the truth clock's."""

    num_responses: int
    num_tokens: int
    longest_tokens: int
    num_iterations: int
    worker_iterations: int
    idle_worker_iterations: int
    """Members that only served their experts."""
    wall_s: float
    occupied_worker_s: float
    num_switches: int
    num_moves: int
    num_retractions: int
    num_refused: int
    """Decisions that could not be carried out."""
    starting_size: int
    batching_reason: str
    placement: str
    placement_reason: str
    decisions: tuple[DecisionFact, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """The counted steps of a run."""

    scheme: str
    num_ranks: int
    """Of the full group."""
    steps: tuple[StepResult, ...]

    @property
    def num_tokens(self) -> int:
        return sum(step.num_tokens for step in self.steps)

    @property
    def wall_s(self) -> float:
        return sum(step.wall_s for step in self.steps)

    @property
    def occupied_worker_s(self) -> float:
        return sum(step.occupied_worker_s for step in self.steps)

    @property
    def worker_iterations(self) -> int:
        return sum(step.worker_iterations for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Rollout throughput."""
        return self.num_tokens / self.wall_s

    @property
    def tokens_per_occupied_s(self) -> float:
        """The headline: per second that a worker was in the group."""
        return self.num_tokens / self.occupied_worker_s

    @property
    def tokens_per_worker_iteration(self) -> float:
        return self.num_tokens / self.worker_iterations

    @property
    def idle_share(self) -> float:
        """Worker-iterations of members that had no tokens of their own; in a static run, the idle tail."""
        return sum(step.idle_worker_iterations for step in self.steps) / self.worker_iterations

    @property
    def num_switches(self) -> int:
        return sum(step.num_switches for step in self.steps)

    @property
    def num_moves(self) -> int:
        return sum(step.num_moves for step in self.steps)

    @property
    def num_retractions(self) -> int:
        return sum(step.num_retractions for step in self.steps)

    @property
    def num_refused(self) -> int:
        return sum(step.num_refused for step in self.steps)

    @property
    def mean_starting_size(self) -> float:
        return sum(step.starting_size for step in self.steps) / len(self.steps)

    def objective(self, price: float, num_ranks: int) -> float:
        """Worker-seconds, a second of wall time counted as `price` times `num_ranks` of them."""
        return self.occupied_worker_s + price * num_ranks * self.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """A run against another one over the same responses."""

    occupied: float
    """Of tokens per occupied worker time."""
    throughput: float
    worker_iterations: float
    """Of tokens per worker-iteration."""

    @classmethod
    def of(cls, run: ScenarioResult, baseline: ScenarioResult) -> "Ratios":
        if run.num_tokens != baseline.num_tokens:
            raise ValueError(
                f"{run.scheme} made {run.num_tokens} tokens, {baseline.scheme} {baseline.num_tokens}"
            )
        return cls(
            occupied=run.tokens_per_occupied_s / baseline.tokens_per_occupied_s,
            throughput=run.tokens_per_s / baseline.tokens_per_s,
            worker_iterations=run.tokens_per_worker_iteration / baseline.tokens_per_worker_iteration,
        )


def smallest_at_least(sizes: Sequence[ScenarioResult], tokens_per_s: float) -> ScenarioResult | None:
    """The smallest of some groups that is at least so fast."""
    fast = [run for run in sizes if run.tokens_per_s >= tokens_per_s]
    return min(fast, key=lambda run: run.num_ranks, default=None)
