"""The `scheduling` group: which prompts share a step, which rank serves which response, who leaves when."""

from dataclasses import dataclass

from omegaconf import MISSING

from flexfloor.config.checks import at_least, complete, within
from flexfloor.config.choices import Batching, ClockName, Placement, ReleaseRule, StartingSize


@dataclass(kw_only=True)
class SchedulingConfig:
    """Which prompts share a step, which rank serves which response, who leaves when."""

    batching: Batching = Batching.fifo
    """Which prompts share a step."""
    window_steps: int = 4
    """Prompts are sorted by expected length within so many steps of the data's order (`length_bucketed`)."""
    min_rank_correlation: float = 0.3
    """Below this rank correlation of prediction and length, bucketing is off."""
    placement: Placement = MISSING
    """Which rank serves which response."""
    starting_size: StartingSize = StartingSize.full
    """With how many ranks a step of an elastic group starts."""
    release: ReleaseRule = ReleaseRule.drained
    """Of an elastic group; a static one releases nobody."""
    price: float | None = None
    """Worker time that one unit of wall time of the whole group is worth; null = by `release`."""
    wall_budget: float | None = None
    """Share of a step's wall time that moving may cost; null = by `release`."""
    moving: bool = True
    """Unfinished responses may be continued on another rank, so that theirs can leave."""
    decision_interval_iterations: int = 16
    """The release policy looks at the group every so many iterations, and when a rank has drained."""
    clock: ClockName = ClockName.auto
    """What an iteration costs, for every decision that weighs time."""
    model_tokens_per_token: int = 1
    """One token here stands for so many of the model that `clock` prices; for tiny models with short
    responses only."""
    history: str | None = None
    """SQLite file of response lengths, kept over runs; null = in the run directory."""
    dataset: str | None = None
    """Name of the data in the history; null = `data.source`, `data.path` and `data.task`."""

    def __post_init__(self) -> None:
        complete(self, "scheduling")
        at_least(self, "scheduling", 1, "window_steps", "decision_interval_iterations")
        at_least(self, "scheduling", 1, "model_tokens_per_token")
        at_least(self, "scheduling", 0, "price", "wall_budget")
        within(self, "scheduling", -1, 1.001, "min_rank_correlation")
