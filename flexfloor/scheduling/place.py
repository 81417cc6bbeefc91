"""Placement: which rank of the EP group decodes a response. PURE: events in, a dp_rank out.

`submit` asks for a rank and counts the response there, `finish` takes it off again, whether it ended or its
attempt was lost. A policy that wants the response to wait for a free place answers None; the caller asks
again, in the same order, after the next `finish`.
"""

from typing import Protocol

from flexfloor.config import SchedulingConfig
from flexfloor.config.schema import Placement


class PlacementPolicy(Protocol):
    """Responses are named by `response_id`; a response is on at most one rank at a time."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def inflight(self) -> tuple[int, ...]:
        """Unfinished responses per dp_rank."""
        ...

    def submit(self, response_id: str) -> int | None:
        """The rank for this response, or None: wait until another one finishes."""
        ...

    def finish(self, response_id: str) -> None:
        """The response left its rank: finished, aborted or lost."""
        ...


class _Ranks:
    """Book of who is where, shared by the policies."""

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks={num_ranks}: a group has at least one rank")
        self._counts = [0] * num_ranks
        self._rank_of: dict[str, int] = {}

    @property
    def num_ranks(self) -> int:
        return len(self._counts)

    @property
    def inflight(self) -> tuple[int, ...]:
        return tuple(self._counts)

    def finish(self, response_id: str) -> None:
        dp_rank = self._rank_of.pop(response_id, None)
        if dp_rank is None:
            raise ValueError(f"response {response_id} finished, but it is on no rank")
        self._counts[dp_rank] -= 1

    def _assign(self, response_id: str, dp_rank: int) -> int:
        self._refuse_second(response_id)
        self._rank_of[response_id] = dp_rank
        self._counts[dp_rank] += 1
        return dp_rank

    def _refuse_second(self, response_id: str) -> None:
        if response_id in self._rank_of:
            raise ValueError(f"response {response_id} is already on dp_rank {self._rank_of[response_id]}")


class RoundRobin(_Ranks):
    """What verl gets inside one EP group: arrival order over the ranks, whatever the lengths.

    Nothing waits here: what exceeds a rank's running limit queues on that rank, first come first served.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._num_submitted = 0

    def submit(self, response_id: str) -> int:
        dp_rank = self._assign(response_id, self._num_submitted % self.num_ranks)
        self._num_submitted += 1
        return dp_rank


class LeastInflight(_Ranks):
    """The rank with the fewest unfinished responses, lowest rank first.

    With a running limit, responses beyond it wait here and not on a rank, so the rank that frees a place
    first takes the next one.
    """

    def __init__(self, num_ranks: int, running_limit: int | None = None) -> None:
        super().__init__(num_ranks)
        if running_limit is not None and running_limit < 1:
            raise ValueError(f"running_limit={running_limit}: a rank runs at least one response")
        self._running_limit = running_limit

    def submit(self, response_id: str) -> int | None:
        self._refuse_second(response_id)
        fewest = min(self._counts)
        if self._running_limit is not None and fewest >= self._running_limit:
            return None
        return self._assign(response_id, self._counts.index(fewest))


def running_limit_per_rank(max_running_requests: int, num_ranks: int) -> int:
    """Running responses of one rank: the engine divides the group's limit by the ranks and rounds down."""
    return max(1, max_running_requests // num_ranks)


def make_placement(
    scheduling: SchedulingConfig, *, num_ranks: int, max_running_requests: int
) -> PlacementPolicy:
    """A fresh policy for one rollout step."""
    if scheduling.placement is Placement.round_robin:
        return RoundRobin(num_ranks)
    return LeastInflight(num_ranks, running_limit_per_rank(max_running_requests, num_ranks))
