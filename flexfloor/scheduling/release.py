"""Release: which ranks leave the EP group now. PURE: what is observed comes in, ranks go out.

The simplest rule: a rank leaves as soon as it has no response left, down to the floor, whichever ranks those
are. Nobody leaves when nothing runs any more: the step is over, and all would only have to come back.
"""

from collections.abc import Collection, Sequence


class DrainedRelease:
    """One rollout step's decisions.

    Hysteresis: a rank stays `hold_s` after its last response ended; one that got late work after it had been
    released stays to the end of the step, so that work that trickles in cannot make it come and go.
    """

    def __init__(self, *, floor: int, hold_s: float) -> None:
        if floor < 1 or hold_s < 0:
            raise ValueError(
                f"floor={floor}, hold_s={hold_s}: at least one rank serves, and time is positive"
            )
        self._floor = floor
        self._hold_s = hold_s
        self._drained_since_s: dict[int, float] = {}
        self._released: set[int] = set()
        self._kept: set[int] = set()

    def decide(self, *, now_s: float, inflight: Sequence[int], members: Collection[int]) -> tuple[int, ...]:
        """The members to release, longest drained first. `inflight`: unfinished responses per dp_rank."""
        self._kept |= {rank for rank in self._released if inflight[rank]}
        for rank, count in enumerate(inflight):
            if count:
                self._drained_since_s.pop(rank, None)
            else:
                self._drained_since_s.setdefault(rank, now_s)
        if not any(inflight):
            return ()
        ready = [rank for rank in members if self._may_leave(rank, now_s)]
        ready.sort(key=lambda rank: (self._drained_since_s[rank], rank))
        leaving = tuple(ready[: max(0, len(members) - self._floor)])
        self._released |= set(leaving)
        return leaving

    def _may_leave(self, rank: int, now_s: float) -> bool:
        since_s = self._drained_since_s.get(rank)
        return since_s is not None and now_s - since_s >= self._hold_s and rank not in self._kept
