"""Carries out the server's own release: places requests, watches them end, lets ranks go, brings them back.

Runs in the server's event loop alone. Whether and how a rank leaves stays the membership manager's decision.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from flexfloor.membership.status import MembershipStatus, OperationResult
from sglang_patches.release.rule import GroupNow, ServerRelease
from sglang_patches.release.tracker import RequestTracker, SentRequest
from sglang_patches.release.weigh import CostWeigher

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.02
"""About a decode iteration of a small model."""
_CAN_SERVE = ("serving", "starting")
_CAN_RETURN = ("parked", "draining")


class Group(Protocol):
    """The part of a membership manager that this room, and the routes, use."""

    @property
    def num_dropped(self) -> dict[str, int]:
        """Frames that were no message, or of a stranger, by reason."""

    def status(self) -> MembershipStatus: ...

    def release(
        self, ep_ranks: tuple[int, ...], leave: str = "park", operation_id: str | None = None
    ) -> "Future[OperationResult]": ...

    def rejoin(
        self, ep_ranks: tuple[int, ...] = (), operation_id: str | None = None
    ) -> "Future[OperationResult]": ...

    def taken_up(self) -> "Future[None]": ...


class ReleaseControl:
    """One server's.

    Args:
        live: SGLang's table of live requests.
        is_on: whether ranks may leave now; placement goes on all the same.
        weigher: None: every drained rank leaves.
    """

    def __init__(
        self,
        group: Group,
        rule: ServerRelease,
        tracker: RequestTracker,
        live: Mapping[str, Any],
        *,
        is_on: Callable[[], bool],
        weigher: CostWeigher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._rule = rule
        self._tracker = tracker
        self._live = live
        self._is_on = is_on
        self._weigher = weigher
        self._clock = clock
        self._order: Future[OperationResult] | None = None
        self._began_at_s = 0.0
        self._watch: asyncio.Task[None] | None = None
        self._last_refusal = ""

    def place(self, named: int | None) -> int:
        """The rank of a request that is about to be sent."""
        self.settle()
        now_s = self._clock()
        group = self._now()
        placed = self._rule.arrive(group, now_s, named)
        if placed.begins_step:
            self._began_at_s = now_s
            if self._weigher is not None:
                self._weigher.begin_step()
            if group.away:
                # At once for all of them, rather than one by one as requests reach them.
                self._group.rejoin()
        return placed.dp_rank

    def watch(self) -> None:
        """A request was sent: look until all are over."""
        if self._watch is None or self._watch.done():
            self._watch = asyncio.get_running_loop().create_task(self._look_on())
            self._watch.add_done_callback(_report_end)

    def settle(self) -> None:
        """Take in which requests are over."""
        for request in self._tracker.settle(self._live):
            if request.dp_rank is not None:
                self._rule.finish(request.dp_rank)
            if self._weigher is not None:
                self._weigher.lengths.add(request.num_tokens, request.cap_tokens)

    def look(self) -> None:
        """Let those go that should."""
        self.settle()
        self._take_result()
        if not self._is_on():
            return
        now_s, group = self._clock(), self._now()
        leavers = self._rule.leavers(group, now_s)
        if leavers and self._weigher is not None:
            leavers = self._weighed(leavers, group, now_s)
        if leavers:
            self._order = self._group.release(leavers)
            logger.info("event=release leavers=%s running=%d", leavers, self._rule.num_running)

    def _weighed(self, leavers: tuple[int, ...], group: GroupNow, now_s: float) -> tuple[int, ...]:
        assert self._weigher is not None, "the caller looked"
        requests: list[SentRequest] = list(self._tracker)
        busy = {request.dp_rank for request in requests if request.dp_rank is not None}
        members = sorted({*group.routed, *busy})
        return self._weigher.leavers(leavers, members, requests, now_s - self._began_at_s)

    def _now(self) -> GroupNow:
        status = self._group.status()
        states = sorted(status.states.items())
        return GroupNow(
            routed=tuple(rank for rank, state in states if state in _CAN_SERVE),
            away=tuple(rank for rank, state in states if state in _CAN_RETURN),
            floor=status.floor,
            is_still=self._order is not None or status.num_fences > 0,
        )

    def _take_result(self) -> None:
        order = self._order
        if order is None or not order.done():
            return
        self._order = None
        # The manager's end ends the server; its reason is in the log.
        result = None if order.exception() else order.result()
        if result is None or result.ok:
            return
        self._rule.refused(self._clock())
        if result.reason != self._last_refusal:
            self._last_refusal = result.reason
            logger.info("event=release_refused %s", result.reason)

    async def _look_on(self) -> None:
        while len(self._tracker) or self._order is not None:
            self.look()
            await asyncio.sleep(_LOOK_INTERVAL_S)


def _report_end(watch: "asyncio.Task[None]") -> None:
    if not watch.cancelled() and (error := watch.exception()) is not None:
        logger.error("flexfloor: the release of drained ranks stopped until the next request", exc_info=error)
