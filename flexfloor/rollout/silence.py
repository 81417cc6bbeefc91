"""Notice that a stream went silent, for the price of one assignment per chunk."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self


class SilenceWatch:
    """Lets `scope` time out when nothing was heard for `timeout_s`.

    Before the first chunk the response may be queueing on its rank, so what `others_heard_at_s` says of the
    rank's other responses counts as a sign of life. Times are those of the event loop.
    """

    def __init__(
        self, scope: asyncio.Timeout, timeout_s: float, others_heard_at_s: Callable[[], float]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._scope = scope
        self._timeout_s = timeout_s
        self._others_heard_at_s = others_heard_at_s
        self._heard_at_s = self._loop.time()
        self.has_begun = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._timeout_s, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def heard(self) -> float:
        """A chunk arrived; returns the time."""
        self.has_begun = True
        self._heard_at_s = self._loop.time()
        return self._heard_at_s

    def limit(self, timeout_s: float) -> None:
        """From now on allow only `timeout_s` of silence."""
        if self._timer is not None:
            self._timer.cancel()
        self._timeout_s = min(self._timeout_s, timeout_s)
        self._timer = self._loop.call_later(self._timeout_s, self._look)

    def _look(self) -> None:
        last_s = self._heard_at_s if self.has_begun else max(self._heard_at_s, self._others_heard_at_s())
        # Moving the timer with every chunk would cost more: look again when the deadline could have passed.
        if (left_s := last_s + self._timeout_s - self._loop.time()) > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self._scope.reschedule(self._loop.time())
