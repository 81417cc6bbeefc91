"""A clock for deadlines: time in which this process could not run, or that was skipped, is left out. PURE."""

from collections.abc import Callable

LATE_S = 1.0
"""A loaded machine may wake us so late; more is a jump."""


class SteadyClock:
    """Say with `sleeps_until` when you mean to look again, and call `woke` first when you do.

    A stopped process, a suspended machine and a clock that was set would else make everybody look silent, and
    every deadline look passed, before anybody could be heard.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._planned_s: float | None = None
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return self._clock() - self.skipped_s

    def sleeps_until(self, at_s: float | None) -> None:
        """On this clock. None: for ever."""
        self._planned_s = at_s

    def woke(self) -> float:
        """How much was skipped now."""
        planned_s, self._planned_s = self._planned_s, None
        if planned_s is None:
            return 0.0
        late_s = self() - planned_s
        if late_s <= LATE_S:
            return 0.0
        self.skipped_s += late_s
        return late_s
