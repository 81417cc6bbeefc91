"""One recovery, from the first sign of a loss to the last report. PURE; only Membership touches it.

    suspected --a rank is lost, or loss_wait_s over--> breaking --every live rank has reported--> restoring
        ^                                                 ^                                           |
        |                                                 +--------- another rank is lost ------------+
        +----------------- a rank broke again, and nobody is known lost ------------------------------+
                                                                       all have recovered --> over

Every entry into `breaking` has a generation of its own. A report counts for the generation that it names,
since what a rank holds may have changed in between.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from flexfloor.experts.placement import ExpertPlacement
from flexfloor.membership.change import Change, braced
from flexfloor.membership.events import RankBroke, RankRecovered, WeightVersion


class Step(StrEnum):
    suspected = "suspected"
    """A rank has left its collective, and nobody is known lost."""
    breaking = "breaking"
    """Every live rank is told to leave its collective and to say what it holds."""
    restoring = "restoring"
    """The next group is out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextGroup:
    membership_epoch: int
    members: tuple[int, ...]
    placement: ExpertPlacement
    targets: tuple[int, ...]
    weight_version: WeightVersion


@dataclass(slots=True, kw_only=True)
class Recovery:
    detected_at: float
    """When the newest loss was known, manager's clock, seconds."""
    rosters: dict[int, tuple[int, ...]]
    """membership_epoch -> members, of every group that a live rank may run in."""
    change: Change | None
    """That was in flight and dies with the loss, or has come true on some ranks."""
    step: Step = Step.suspected
    generation: int = 0
    """Means nothing while suspected."""
    deadline_s: float = 0.0
    lost: tuple[int, ...] = ()
    """Since the group was last whole."""
    live: tuple[int, ...] = ()
    """As of the newest generation; who exits meanwhile is taken out."""
    reports: dict[int, RankBroke] = field(default_factory=dict)
    recovered: dict[int, RankRecovered] = field(default_factory=dict)
    next_group: NextGroup | None = None
    """Of this generation, once it is out."""
    has_fenced: bool = False
    """In this step: a rank that did not answer."""

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Ranks that the step still has to hear from."""
        heard = self.recovered if self.step is Step.restoring else self.reports
        return tuple(rank for rank in self.live if rank not in heard)

    def is_in_group(self, ep_rank: int, membership_epoch: int) -> bool:
        """Whether a rank that speaks of this epoch is in the group, and not outside."""
        return ep_rank in self.rosters.get(membership_epoch, ())

    def __str__(self) -> str:
        text = f"recovery generation={self.generation} {self.step}, lost {braced(self.lost)}"
        return f"{text}, waits for {braced(self.waits_for)}"
