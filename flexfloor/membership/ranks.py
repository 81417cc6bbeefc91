"""States of a rank and the moves between them. PURE.

starting --> serving <--> draining --> parked --> serving
                              |
                              +------> exited        any but exited --> lost
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from flexfloor.membership.events import Leave, WeightVersion


class RankState(StrEnum):
    starting = "starting"
    """Its process has not said hello yet."""
    serving = "serving"
    """In the group; takes new requests."""
    draining = "draining"
    """In the group; finishes what it has."""
    parked = "parked"
    """Outside the group, process alive."""
    exited = "exited"
    """Outside, process gone by order."""
    lost = "lost"
    """Process gone without an order."""


MOVES: Mapping[RankState, frozenset[RankState]] = {
    RankState.starting: frozenset({RankState.serving, RankState.lost}),
    RankState.serving: frozenset({RankState.draining, RankState.lost}),
    RankState.draining: frozenset({RankState.serving, RankState.parked, RankState.exited, RankState.lost}),
    RankState.parked: frozenset({RankState.serving, RankState.lost}),
    RankState.exited: frozenset(),
    RankState.lost: frozenset(),
}
"""exited and lost end a life. A recovery goes on without the rank; a new life needs a new server."""

MEMBER_STATES = frozenset({RankState.starting, RankState.serving, RankState.draining})
"""A live rank in one of these is in the group."""


@dataclass(slots=True, kw_only=True)
class Rank:
    ep_rank: int
    state: RankState = RankState.starting
    incarnation: int | None = None
    weight_version: WeightVersion | None = None
    leave: Leave = Leave.park
    """How it will leave; means nothing unless draining."""
    is_drained: bool = False
    """Draining, and without a request as far as it has said."""
    is_woken: bool = False
    """It has work and cannot serve it where it is: outside the group, or about to be."""
    is_wanted: bool = False
    """A rejoin asked for it."""
