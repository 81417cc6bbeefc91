"""Who serves a request and who may leave, decided by the server itself. PURE: the clock is an argument.

Rule 1: a rank leaves when it has nothing to do and no request has arrived for a while, down to the floor.
Rule 2: nobody leaves while nothing runs: a step has not begun, or is over.
Rule 3: a request goes to the rank with fewest, in turn. It wakes a rank that is away only where every rank
that serves has as many requests as the fullest rank had in this step: more would be slower than a full group.
Rule 4: the first request after nothing ran begins a step, and everybody comes back for it.
Rule 5: each rank that is woken within a step doubles the wait of rule 1, so that no rank comes and goes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_MOST_DOUBLINGS = 6
_REFUSED_WAIT_S = 1.0
"""What the manager refused it would refuse again at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNow:
    """The group as the manager has it."""

    routed: tuple[int, ...]
    """Ranks that take requests."""
    away: tuple[int, ...]
    """Ranks that can come back: parked, or draining."""
    floor: int
    is_still: bool = False
    """A control call holds the group, or a release is on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a request goes."""

    dp_rank: int
    begins_step: bool
    """Everybody should come back."""


class ServerRelease:
    """One server's requests by rank.

    Args:
        quiet_s: how long no request may have arrived before ranks leave. A driver that starts a response
            whenever another one ends would otherwise lose ranks in mid-step.
    """

    def __init__(self, num_ranks: int, *, quiet_s: float) -> None:
        self.inflight = [0] * num_ranks
        self.num_wakes = 0
        """Ranks woken within this step."""
        self._quiet_s = quiet_s
        self._most = 0
        """Requests of the fullest rank in this step."""
        self._next = 0
        self._woken: set[int] = set()
        self._arrived_at_s = 0.0
        self._not_before_s = 0.0

    @property
    def num_running(self) -> int:
        return sum(self.inflight)

    def arrive(self, group: GroupNow, at_s: float, named: int | None = None) -> Placed:
        """Place a request; `named` is the rank that the driver wants."""
        begins_step = self.num_running == 0
        if begins_step:
            self.num_wakes, self._most = 0, 0
            self._woken = set(group.away)
        self._woken &= set(group.away)
        dp_rank = self._choose(group) if named is None else named
        if dp_rank in group.away and dp_rank not in self._woken:
            self._woken.add(dp_rank)
            self.num_wakes += 1
        self.inflight[dp_rank] += 1
        self._most = max(self._most, self.inflight[dp_rank])
        self._next = (dp_rank + 1) % len(self.inflight)
        self._arrived_at_s = at_s
        return Placed(dp_rank=dp_rank, begins_step=begins_step)

    def finish(self, dp_rank: int) -> None:
        assert self.inflight[dp_rank] > 0, "what ends was placed"
        self.inflight[dp_rank] -= 1

    def refused(self, at_s: float) -> None:
        """The manager refused a release."""
        self._not_before_s = at_s + _REFUSED_WAIT_S

    def leavers(self, group: GroupNow, at_s: float) -> tuple[int, ...]:
        """Ranks that should leave now, ascending."""
        quiet_s = self._quiet_s * 2 ** min(self.num_wakes, _MOST_DOUBLINGS)
        if group.is_still or not self.num_running or at_s < self._not_before_s:
            return ()
        if at_s - self._arrived_at_s < quiet_s:
            return ()
        num_may = len(group.routed) - group.floor
        idle = [rank for rank in group.routed if not self.inflight[rank]]
        # The last ones first: the first rank's node can never be given back.
        return tuple(idle[-num_may:]) if num_may > 0 else ()

    def _choose(self, group: GroupNow) -> int:
        for ranks in (group.routed, group.away):
            roomy = [rank for rank in ranks if self.inflight[rank] < self._most]
            if roomy:
                return self._fewest(roomy, ())
        return self._fewest((*group.routed, *group.away), group.away)

    def _fewest(self, ranks: Sequence[int], away: Sequence[int]) -> int:
        num_ranks = len(self.inflight)
        return min(
            ranks, key=lambda rank: (self.inflight[rank], rank in away, (rank - self._next) % num_ranks)
        )
