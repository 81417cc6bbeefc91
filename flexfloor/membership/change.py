"""One change of the group, from the plan to the last report. PURE; only Membership touches it.

    preparing --first RankSwitched--------------> agreed --all reported--> over: the epoch is in force
        |                                            ^
        | CancelAsked, or too long                   | every voter answers dropped=False, or one switches
        v                                            |
    cancelling ----------------------------------------+
        | all voters answered, one of them dropped it
        v
    withdrawing (only where ranks were to join) --all joiners answered--> over: dead, the epoch is not reused

The old members vote, so only their answers tell whether the group agreed. Joiners have no vote: they hear of
a cancel when it is certain, never before.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from flexfloor.experts.placement import ExpertPlacement
from flexfloor.membership.events import RankSwitched


class Phase(StrEnum):
    preparing = "preparing"
    """The plan is out; nobody is known to have switched."""
    cancelling = "cancelling"
    """The old members were asked to drop the plan."""
    withdrawing = "withdrawing"
    """It is dropped; the joiners are told."""
    agreed = "agreed"
    """It cannot be stopped any more."""


@dataclass(slots=True, kw_only=True)
class Change:
    membership_epoch: int
    old_members: tuple[int, ...]
    members: tuple[int, ...]
    leavers_exit: tuple[int, ...]
    placement: ExpertPlacement
    """Of the new group."""
    deadline_s: float
    phase: Phase = Phase.preparing
    switched: dict[int, RankSwitched] = field(default_factory=dict)
    answers: dict[int, bool] = field(default_factory=dict)
    """ep_rank -> dropped."""
    is_asked: bool = False
    """A leaver asked for the cancel, because it had work."""

    @property
    def targets(self) -> tuple[int, ...]:
        return tuple(sorted({*self.old_members, *self.members}))

    @property
    def leavers(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.old_members if rank not in self.members)

    @property
    def joiners(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.members if rank not in self.old_members)

    @property
    def cancel_targets(self) -> tuple[int, ...]:
        """Whose answer the phase waits for."""
        return self.joiners if self.phase is Phase.withdrawing else self.old_members

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Ranks that the current phase still has to hear from."""
        if self.phase in (Phase.preparing, Phase.agreed):
            return tuple(rank for rank in self.targets if rank not in self.switched)
        return tuple(rank for rank in self.cancel_targets if rank not in self.answers)

    def __str__(self) -> str:
        return (
            f"change membership_epoch={self.membership_epoch} members {braced(self.old_members)} -> "
            f"{braced(self.members)} {self.phase}, waits for {braced(self.waits_for)}"
        )


def braced(ep_ranks: tuple[int, ...]) -> str:
    return "{" + ",".join(map(str, ep_ranks)) + "}"
