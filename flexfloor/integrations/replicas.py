"""Which of several replicas of the engine takes a request. PURE: no clock, no sockets.

A replica's room is the number of its ranks that get new requests now, which falls while it shrinks at the end
of a step. Requests go where there are fewest per such rank, so a replica that is giving ranks back gets less.
A conversation stays on its replica, whose cache holds its prefix.

When no request is left anywhere the step is over, and every rank is back before the next one begins: then
what was last heard of the membership says nothing any more, and each replica counts with all its ranks.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

MAX_STICKY = 10_000
NO_SERVERS = "No available servers in load balancer"
"""verl's asynchronous client waits for a server on these words only."""


class NoReplica(RuntimeError):
    """There is no replica to choose from."""


@dataclass(slots=True)
class _Replica:
    num_ranks: int
    num_routed: int
    num_inflight: int = 0


class ReplicaPool:
    """With `max_requests_per_rank` requests fill one replica after the other up to that many per rank, so
    that the last ones may stay drained; beyond it, and without it, the least loaded one is taken.

    `num_ranks` is taken of a replica until its membership is known.
    """

    def __init__(
        self,
        *,
        max_requests_per_rank: int | None = None,
        num_ranks: int = 1,
        max_sticky: int = MAX_STICKY,
    ) -> None:
        if max_requests_per_rank is not None and max_requests_per_rank < 1:
            raise ValueError(
                f"max_requests_per_rank={max_requests_per_rank}: a rank takes at least one request. "
                "Fix: give 1 or more, or leave it out to spread evenly"
            )
        if num_ranks < 1:
            raise ValueError(f"num_ranks={num_ranks}: a replica has at least one rank. Fix: give 1 or more")
        self._limit = max_requests_per_rank
        self._num_ranks = num_ranks
        self._max_sticky = max_sticky
        self._replicas: dict[str, _Replica] = {}
        self._sticky: OrderedDict[str, str] = OrderedDict()

    @property
    def server_ids(self) -> list[str]:
        return list(self._replicas)

    @property
    def inflight(self) -> dict[str, int]:
        """Requests per replica, in the order in which they were added."""
        return {server_id: replica.num_inflight for server_id, replica in self._replicas.items()}

    @property
    def num_routed(self) -> dict[str, int]:
        return {server_id: replica.num_routed for server_id, replica in self._replicas.items()}

    def add(self, server_ids: Iterable[str]) -> None:
        """One that is there already begins anew: its process may be another one."""
        for server_id in server_ids:
            self._replicas[server_id] = _Replica(num_ranks=self._num_ranks, num_routed=self._num_ranks)

    def remove(self, server_ids: Iterable[str]) -> None:
        for server_id in server_ids:
            self._replicas.pop(server_id, None)

    def set_membership(self, server_id: str, *, num_ranks: int, num_routed: int) -> None:
        """What the replica says of itself. Ignored for one that is gone."""
        replica = self._replicas.get(server_id)
        if replica is not None:
            replica.num_ranks = max(1, num_ranks)
            replica.num_routed = (
                replica.num_ranks if self._is_idle else min(replica.num_ranks, max(1, num_routed))
            )

    def acquire(self, request_id: str) -> str:
        """The replica for a request, which counts there until `release`. NoReplica."""
        server_id = self._sticky.get(request_id)
        if server_id is None or server_id not in self._replicas:
            server_id = self._choose()
        self._sticky[request_id] = server_id
        self._sticky.move_to_end(request_id)
        while len(self._sticky) > self._max_sticky:
            self._sticky.popitem(last=False)
        self._replicas[server_id].num_inflight += 1
        return server_id

    def release(self, server_id: str) -> None:
        """Once too often, or after `remove`, it does nothing: verl sends it without waiting for an answer."""
        replica = self._replicas.get(server_id)
        if replica is not None:
            replica.num_inflight = max(0, replica.num_inflight - 1)
        if self._is_idle:
            for one in self._replicas.values():
                one.num_routed = one.num_ranks

    def clear_sticky(self) -> int:
        """Forget which conversation is where; gives how many were known."""
        num_known = len(self._sticky)
        self._sticky.clear()
        return num_known

    @property
    def _is_idle(self) -> bool:
        return not any(replica.num_inflight for replica in self._replicas.values())

    def _choose(self) -> str:
        if not self._replicas:
            raise NoReplica(NO_SERVERS)
        if self._limit is not None:
            limit = self._limit
            with_room = [
                server_id
                for server_id, replica in self._replicas.items()
                if replica.num_inflight < limit * replica.num_routed
            ]
            if with_room:
                # The fullest: `max` takes the first of equals, so they fill in the order they were added.
                return max(with_room, key=self._load)
        # Of equals the one with most ranks, then the first.
        return min(self._replicas, key=lambda server_id: (self._load(server_id), -self._ranks(server_id)))

    def _load(self, server_id: str) -> float:
        replica = self._replicas[server_id]
        return replica.num_inflight / replica.num_routed

    def _ranks(self, server_id: str) -> int:
        return self._replicas[server_id].num_routed
