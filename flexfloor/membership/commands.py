"""What the manager has to do: orders that `Membership.handle` gives out, in this order. PURE."""

from dataclasses import dataclass

from flexfloor.experts.placement import ExpertPlacement
from flexfloor.membership.events import WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDrain(Command):
    """Tell the rank to report as soon as it has no request left."""

    ep_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopDrain(Command):
    ep_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare(Command):
    """Send the plan of the next group to every old and new member."""

    membership_epoch: int
    old_members: tuple[int, ...]
    members: tuple[int, ...]
    leavers_exit: tuple[int, ...]
    """Leavers whose process ends; the others park."""
    old_placement: ExpertPlacement
    new_placement: ExpertPlacement
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Command):
    membership_epoch: int
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakGroup(Command):
    """Wake these ranks from whatever collective they wait in; each answers with what it holds."""

    ep_ranks: tuple[int, ...]
    """Every live rank, parked ones too."""
    generation: int
    lost: tuple[int, ...]
    """All that were lost so far. The group may be broken with nobody newly lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recover(Command):
    """The next group, after a loss. Orders that a rank has not carried out are void, drains included."""

    generation: int
    membership_epoch: int
    members: tuple[int, ...]
    placement: ExpertPlacement
    ep_ranks: tuple[int, ...]
    """Every live rank, parked ones too: who takes part."""
    weight_version: WeightVersion
    """What the members hold and the restored experts must be of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonRank(Command):
    """The rank is lost or has exited: requests that it still has end at the clients. Once per rank."""

    ep_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceRank(Command):
    """See to it that the process ends, and then report it lost."""

    ep_rank: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRouting(Command):
    """New requests go to these ranks only. Never empty."""

    ep_ranks: tuple[int, ...]
    members: tuple[int, ...]
    """Ranks that run iterations, those that drain included; control calls enter at the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishOperation(Command):
    operation_id: str
    ok: bool
    reason: str
    """Empty when ok."""
    membership_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantFence(Command):
    fence_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseFence(Command):
    fence_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail(Command):
    """The group cannot go on. Nothing is ordered after this."""

    reason: str
    """Ends with the story."""
