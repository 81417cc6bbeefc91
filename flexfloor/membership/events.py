"""What happened to the group: past facts that `Membership.handle` takes in. PURE."""

from dataclasses import dataclass
from enum import StrEnum

WeightVersion = int | str
"""Compared for equality only: FlexFloor counts versions, SGLang names them by strings."""


class Leave(StrEnum):
    """How a released rank leaves the group."""

    park = "park"
    """Its process stays alive and may rejoin."""
    exit = "exit"
    """Its process ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    at: float
    """Manager's clock, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvent(Event):
    ep_rank: int
    incarnation: int
    """Which life of the process says it; a stale life is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJoined(RankEvent):
    weight_version: WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRequested(Event):
    operation_id: str
    ep_ranks: tuple[int, ...]
    leave: Leave = Leave.park


@dataclass(frozen=True, slots=True, kw_only=True)
class RejoinRequested(Event):
    operation_id: str
    ep_ranks: tuple[int, ...] = ()
    """Empty: every rank that is parked or on its way there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainFinished(RankEvent):
    """A draining rank has no request left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSwitched(RankEvent):
    """The rank runs in the new group, or has left it."""

    membership_epoch: int
    stall_s: float
    """For how long it served nobody."""
    num_bytes: int
    """Expert weights received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAsked(RankEvent):
    """A rank cannot take part, as a rule because a leaver got work before the change was agreed."""

    membership_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAnswered(RankEvent):
    membership_epoch: int
    dropped: bool
    """True: the rank will never switch to this epoch. False: the group had agreed on it before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkArrived(RankEvent):
    """A request reached a rank that has left the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost(RankEvent):
    """Its process is gone, or was made to go."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBroke(RankEvent):
    """The rank has left its collective, or was outside, and waits for a recovery."""

    generation: int
    """Of the newest order to break that it has heard; 0: of none."""
    membership_epoch: int
    """Of the group that it ran in, or left last."""
    slots: tuple[int | None, ...]
    """The logical expert whose whole weights lie in each of its expert slots; None: nothing usable."""
    weight_version: WeightVersion | None
    """None: its weights are partly of one version and partly of another."""
    where: str
    """What it was doing, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecovered(RankEvent):
    """The rank holds what the recovery gave it, and runs in the new group or stays outside."""

    generation: int
    membership_epoch: int
    stall_s: float
    """Since it broke."""
    num_bytes: int
    """Expert weights restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryFailed(RankEvent):
    """The rank cannot hold what the recovery gives it, and another try would not help."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsUpdated(Event):
    """Every member holds these weights now."""

    weight_version: WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceRequested(Event):
    """A control call of the server waits for a group that stands still."""

    fence_id: str
    full: bool
    """It needs every live rank in the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceReleased(Event):
    fence_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed(Event):
    """Nothing but the clock: a deadline may have come."""
