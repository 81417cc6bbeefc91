"""Ranks leave while the rest of the step decodes, and all are back before anything else happens.

Rule 1: this only asks; whether and how a rank leaves is the membership manager's decision, and a refusal
costs nothing but the gain.
Rule 2: a rank that got late work is back by itself: the request wakes it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flexfloor.membership.client import DriverClient
from flexfloor.scheduling.place import PlacementPolicy
from flexfloor.scheduling.release import DrainedRelease

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.02
"""A decode iteration of a small model; asking more often could not release anybody earlier."""


@dataclass(slots=True, kw_only=True)
class Leaving:
    """One rollout step's releases, over a client that is connected."""

    client: DriverClient
    release: DrainedRelease
    placement: PlacementPolicy
    clock: Callable[[], float] = time.monotonic
    left_at_s: dict[int, float] = field(default_factory=dict)
    """dp_rank -> when its release was done, for ranks that are away."""
    num_refused: int = 0
    _asked: dict[str, tuple[int, ...]] = field(default_factory=dict)

    async def watch(self) -> None:
        """Release ranks as they drain, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def look(self) -> None:
        """Take in what became of earlier requests and ask for what can leave now."""
        self._take_results()
        inflight = self.placement.inflight
        for rank in [rank for rank in self.left_at_s if inflight[rank]]:
            del self.left_at_s[rank]
        for rank in self.release.decide(now_s=self.clock(), inflight=inflight, members=self._members()):
            self._asked[self.client.submit_release([rank])] = (rank,)

    async def rejoin(self) -> None:
        """Bring everybody back. Raises DeadlineExceeded, or RuntimeError with the manager's reason."""
        result = await asyncio.to_thread(self.client.rejoin)
        if not result.ok:
            raise RuntimeError(f"the ranks that left cannot come back: {result.reason}")

    def _members(self) -> list[int]:
        away = {rank for ranks in self._asked.values() for rank in ranks} | set(self.left_at_s)
        return [rank for rank in range(self.placement.num_ranks) if rank not in away]

    def _take_results(self) -> None:
        for result in self.client.poll():
            for rank in self._asked.pop(result.operation_id, ()):
                if result.ok:
                    self.left_at_s[rank] = self.clock()
                else:
                    self.num_refused += 1
                    logger.info("ep_rank=%d stays: %s", rank, result.reason)
