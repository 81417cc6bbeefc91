"""Placement: which rank of the EP group decodes a response. PURE: events in, a dp_rank out.

`submit` asks for a rank and counts the response there, `finish` takes it off again, whether it ended or its
attempt was lost. A policy that wants the response to wait for a free place answers None; the caller asks
again, in the same order, after the next `finish`.

Where a response goes: to the rank that `move` gave it, else to the one that the policy has for it, and where
that rank is not among the members, to the member with the fewest unfinished responses. A lost rank is never a
member again, whoever names it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol


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

    def move(self, response_id: str, dp_rank: int) -> None:
        """From its next `submit` on the response goes to this rank, at once and beyond any running limit.

        It may be on a rank now: that attempt must end first. A later move replaces this one.
        """
        ...

    def set_members(self, members: Collection[int]) -> None:
        """Only these ranks take new responses from now on; all do at the start."""
        ...

    def lose(self, dp_rank: int) -> None:
        """The rank is dead. What is on it will be reported as finished; it gets nothing more."""
        ...

    @property
    def lost(self) -> frozenset[int]:
        """Ranks that `lose` was told of."""
        ...


class _Ranks:
    """Book of who is where, shared by the policies."""

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks={num_ranks}: a group has at least one rank")
        self._counts = [0] * num_ranks
        self._rank_of: dict[str, int] = {}
        self._moved_to: dict[str, int] = {}
        self._members = tuple(range(num_ranks))
        self._lost: frozenset[int] = frozenset()

    @property
    def lost(self) -> frozenset[int]:
        return self._lost

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

    def move(self, response_id: str, dp_rank: int) -> None:
        self._refuse_stranger(dp_rank)
        self._moved_to[response_id] = dp_rank

    def set_members(self, members: Collection[int]) -> None:
        if not members:
            raise ValueError("no members: a group has at least one rank")
        for dp_rank in members:
            self._refuse_stranger(dp_rank)
        # Where all of them are lost, whoever lives serves: the manager lets parked ranks join.
        self._members = tuple(sorted(set(members) - self._lost)) or self._alive()

    def lose(self, dp_rank: int) -> None:
        self._refuse_stranger(dp_rank)
        self._lost |= {dp_rank}
        self.set_members(self._members)

    def _alive(self) -> tuple[int, ...]:
        alive = tuple(rank for rank in range(self.num_ranks) if rank not in self._lost)
        if not alive:
            raise ValueError(f"all {self.num_ranks} ranks of the group are lost")
        return alive

    def _emptiest(self) -> int:
        """The member with the fewest unfinished responses, lowest rank first."""
        return min(self._members, key=lambda dp_rank: (self._counts[dp_rank], dp_rank))

    def _assign(self, response_id: str, dp_rank: int) -> int:
        self._rank_of[response_id] = dp_rank
        self._counts[dp_rank] += 1
        return dp_rank

    def _assign_moved(self, response_id: str) -> int | None:
        """Refuses a second submit; None where no move was ordered."""
        if response_id in self._rank_of:
            raise ValueError(f"response {response_id} is already on dp_rank {self._rank_of[response_id]}")
        dp_rank = self._moved_to.get(response_id)
        if dp_rank is None:
            return None
        return self._assign(response_id, dp_rank if dp_rank in self._members else self._emptiest())

    def _refuse_stranger(self, dp_rank: int) -> None:
        if not 0 <= dp_rank < self.num_ranks:
            raise ValueError(f"dp_rank={dp_rank}: the group has ranks 0 to {self.num_ranks - 1}")


class RoundRobin(_Ranks):
    """What verl gets inside one EP group: arrival order over the ranks, whatever the lengths.

    Nothing waits here: what exceeds a rank's running limit queues on that rank, first come first served.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._next = 0

    def submit(self, response_id: str) -> int:
        moved = self._assign_moved(response_id)
        if moved is not None:
            return moved
        # The next member at or after `_next`, around the end.
        dp_rank = min(self._members, key=lambda rank: (rank - self._next) % self.num_ranks)
        self._next = dp_rank + 1
        return self._assign(response_id, dp_rank)


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
        moved = self._assign_moved(response_id)
        if moved is not None:
            return moved
        dp_rank = self._emptiest()
        if self._running_limit is not None and self._counts[dp_rank] >= self._running_limit:
            return None
        return self._assign(response_id, dp_rank)


class Planned(_Ranks):
    """Ranks that were chosen before the step, `rank_of` by response_id.

    Nothing waits here: a rank's queue keeps the order of submission.
    """

    def __init__(self, rank_of: Mapping[str, int], num_ranks: int) -> None:
        super().__init__(num_ranks)
        for dp_rank in set(rank_of.values()):
            self._refuse_stranger(dp_rank)
        self._planned = dict(rank_of)

    def submit(self, response_id: str) -> int:
        moved = self._assign_moved(response_id)
        if moved is not None:
            return moved
        dp_rank = self._planned.get(response_id)
        if dp_rank is None:
            raise ValueError(f"response {response_id} is not one of the {len(self._planned)} planned ones")
        return self._assign(response_id, dp_rank if dp_rank in self._members else self._emptiest())


class Chunked(Planned):
    """Contiguous chunks of the request order, equal to within one response, first chunk on rank 0."""

    def __init__(self, response_ids: Sequence[str], num_ranks: int) -> None:
        ranks = chunks(len(response_ids), max(1, num_ranks))
        super().__init__(dict(zip(response_ids, ranks, strict=True)), num_ranks)


def chunks(num_responses: int, num_ranks: int) -> list[int]:
    """The rank of each response: ascending, counts equal to within one."""
    return [index * num_ranks // num_responses for index in range(num_responses)]


def running_limit_per_rank(max_running_requests: int, num_ranks: int) -> int:
    """Running responses of one rank: the engine divides the group's limit by the ranks and rounds down."""
    return max(1, max_running_requests // num_ranks)
