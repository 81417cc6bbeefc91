"""A group that nobody leaves, asked like one that can change."""

import uuid
from collections.abc import Callable
from concurrent.futures import Future

from flexfloor.membership.status import MembershipStatus, OperationResult

_FIX = "start flexfloor-serve with --flexfloor-membership elastic"


class StaticGroup:
    """Answers at once."""

    def __init__(self, num_ranks: int, num_experts: int, weight_version: Callable[[], str]) -> None:
        """`num_experts` 0: unknown, or not spread over the ranks."""
        self._ranks = tuple(range(num_ranks))
        self._experts_per_rank = dict.fromkeys(self._ranks, num_experts // num_ranks) if num_experts else {}
        self._weight_version = weight_version

    def status(self) -> MembershipStatus:
        return MembershipStatus(
            membership_epoch=0,
            members=self._ranks,
            routed=self._ranks,
            states=dict.fromkeys(self._ranks, "serving"),
            weight_versions=dict.fromkeys(self._ranks, self._weight_version()),
            floor=len(self._ranks),
            experts_per_rank=self._experts_per_rank,
            last_switches=(),
            change=None,
            num_fences=0,
            failed=None,
        )

    @property
    def num_dropped(self) -> dict[str, int]:
        return {}

    def release(
        self, ep_ranks: tuple[int, ...], leave: str = "park", operation_id: str | None = None
    ) -> "Future[OperationResult]":
        return _result(operation_id, f"the group is static: no rank can leave it. Fix: {_FIX}")

    def rejoin(
        self, ep_ranks: tuple[int, ...] = (), operation_id: str | None = None
    ) -> "Future[OperationResult]":
        unknown = [rank for rank in ep_ranks if rank not in self._ranks]
        if unknown:
            last = self._ranks[-1]
            return _result(operation_id, f"ep_rank {unknown[0]} does not exist: the ranks are 0 to {last}")
        return _result(operation_id, "")

    def taken_up(self) -> "Future[None]":
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _result(operation_id: str | None, reason: str) -> "Future[OperationResult]":
    future: Future[OperationResult] = Future()
    future.set_result(
        OperationResult(
            operation_id=operation_id or uuid.uuid4().hex, ok=not reason, reason=reason, membership_epoch=0
        )
    )
    return future
