"""Counts the iterations of one rank: forward passes of its EP group in which some rank has tokens.

The scheduler runs a pass exactly then: on a rank without tokens it is an idle pass, and when no rank has any
there is none. So ranks of one group count the same `num_iterations`.
"""

from dataclasses import asdict, dataclass
from typing import Any

_ATTRIBUTE = "_flexfloor_iteration_counters"


@dataclass(slots=True, kw_only=True)
class IterationCounters:
    """Counts since the start of this scheduler process, warm-up included; readers take differences."""

    num_iterations: int = 0
    num_prefill_iterations: int = 0
    """Iterations in which some rank of the group prefilled."""
    num_idle_iterations: int = 0
    """Iterations in which this rank had no tokens of its own and only served its experts."""

    @classmethod
    def of(cls, scheduler: Any) -> "IterationCounters":
        """The counters of this scheduler, kept on it so that they live as long as it does."""
        counters: IterationCounters | None = getattr(scheduler, _ATTRIBUTE, None)
        if counters is None:
            counters = cls()
            setattr(scheduler, _ATTRIBUTE, counters)
        return counters

    def count(self, *, is_idle: bool, is_prefill: bool) -> None:
        """Count one forward pass."""
        self.num_iterations += 1
        self.num_prefill_iterations += is_prefill
        self.num_idle_iterations += is_idle

    def as_dict(self) -> dict[str, int]:
        """The counts under their own names."""
        return asdict(self)
