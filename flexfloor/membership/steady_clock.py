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
        self._slept: tuple[float, float] | None = None
        """Since when, and until when."""
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return self._clock() - self.skipped_s

    def sleeps_until(self, at_s: float | None) -> None:
        """On this clock. None: for ever."""
        self._slept = None if at_s is None else (self(), at_s)

    def woke(self) -> float:
        """How much was skipped now."""
        slept, self._slept = self._slept, None
        if slept is None or self() - slept[1] <= LATE_S:
            return 0.0
        # How much of the sleep was real cannot be told, so none of it counts.
        skipped_s = self() - slept[0]
        self.skipped_s += skipped_s
        return skipped_s
