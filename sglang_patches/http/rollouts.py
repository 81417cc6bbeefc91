"""The marked rollout steps of a server: one at a time, everybody back before and after each."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from flexfloor.membership.status import MembershipStatus, OperationResult, RolloutFigures
from sglang_patches.http.rollout import Presence, RolloutEnd, RolloutStart, figures

logger = logging.getLogger(__name__)

Reply = tuple[int, dict[str, Any]]
"""HTTP status and JSON object."""


class _NotBack(Exception):
    """Some rank is away that should be here."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self.reply = reply


class Rollouts:
    """Lives in the event loop; `presence` is also told of changes from the manager's thread.

    Args:
        counters: iterations so far of each rank that answers; may raise TimeoutError.
        num_tokens: response tokens since the server started.
        on_mark: takes what a stream of events says of a begin or an end.
        timeout_s: how long ranks may take to come back.
    """

    def __init__(
        self,
        *,
        status: Callable[[], MembershipStatus],
        rejoin: Callable[[], "Future[OperationResult]"],
        presence: Presence,
        counters: Callable[[], Awaitable[Mapping[int, int]]],
        num_tokens: Callable[[], int],
        on_mark: Callable[[dict[str, Any]], None],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._status = status
        self._rejoin = rejoin
        self._presence = presence
        self._counters = counters
        self._num_tokens = num_tokens
        self._on_mark = on_mark
        self._timeout_s = timeout_s
        self._clock = clock
        self._start: RolloutStart | None = None
        self._busy = ""
        """`begins` or `ends` while a reply is being made."""
        self.marks_steps = False
        """The driver has begun a step: from then on it says when one runs."""
        self.last: RolloutFigures | None = None

    @property
    def is_running(self) -> bool:
        return self._start is not None and not self._busy

    async def begin(self, rollout_step: int | None) -> Reply:
        if self._busy or self._start is not None:
            return _refused(f"{self._name(self._start)} {self._busy or 'has begun and has not ended'}")
        self._busy, self.marks_steps = "begins", True
        try:
            iterations = await self._everybody()
            self._start = RolloutStart(
                rollout_step=rollout_step,
                iterations=iterations,
                num_tokens=self._num_tokens(),
                at_s=self._clock(),
            )
        except _NotBack as error:
            return error.reply
        finally:
            self._busy = ""
        self._presence.forget_before(self._start.at_s)
        payload = {"rollout_step": rollout_step, "membership_epoch": self._status().membership_epoch}
        self._on_mark({"type": "rollout", "action": "begin", **payload})
        return 200, {"status": "begun", **payload}

    async def end(self, rollout_step: int | None) -> Reply:
        start = self._start
        if self._busy or start is None:
            return _refused(
                f"{self._name(start)} {self._busy}" if self._busy else "no rollout step has begun"
            )
        if rollout_step is not None and start.rollout_step not in (None, rollout_step):
            return _refused(f"rollout_step={rollout_step}: {self._name(start)} has begun")
        self._busy = "ends"
        try:
            end = self._end_of(start)
            iterations = await self._everybody()
            found = figures(start, end, iterations, len(self._status().states))
            self._start, self.last = None, found
        except _NotBack as error:
            return error.reply
        finally:
            self._busy = ""
        payload = {"rollout_step": start.rollout_step, **asdict(found)}
        self._on_mark({"type": "rollout", "action": "end", **payload})
        return 200, {"status": "ended", **payload}

    def _end_of(self, start: RolloutStart) -> RolloutEnd:
        now_s = self._clock()
        return RolloutEnd(
            at_s=now_s,
            num_tokens=self._num_tokens(),
            membership_epoch=self._status().membership_epoch,
            occupied_worker_s=self._presence.occupied_s(start.at_s, now_s),
            num_releases=self._presence.num_left(start.at_s, now_s),
        )

    async def _everybody(self) -> Mapping[int, int]:
        """Iterations of every rank, once all are back. Raises _NotBack."""
        future = self._rejoin()
        try:
            result = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), self._timeout_s)
            if result.ok:
                return await self._counters()
        except TimeoutError as error:
            text = f"the ranks have not all come back and answered in {self._timeout_s:g} s. Fix: ask again"
            raise _NotBack((504, {"reason": text})) from error
        raise _NotBack(_refused(f"the ranks that left cannot come back: {result.reason}"))

    @staticmethod
    def _name(start: RolloutStart | None) -> str:
        if start is None or start.rollout_step is None:
            return "a rollout step"
        return f"rollout_step {start.rollout_step}"


def _refused(reason: str) -> Reply:
    return 409, {"status": "refused", "reason": reason}
