"""How long a running step has taken, in the time that its cost model prices.

Where the clock is that of the device, that is the time on the wall, and what iterations really take corrects
the clock. Where a clock stands for another machine, the iterations that were seen are priced by it: a
decision by its prices must not mix in seconds of this one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from flexfloor.scheduling.clocks import CorrectedClock
from flexfloor.scheduling.cost import Clock, GroupLoad
from flexfloor.scheduling.decision import GroupView

_MIN_ITERATIONS = 4
"""Fewer between two looks are timed too roughly to correct anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Iterations between two views of one membership, as the clock prices them and as they were."""

    predicted_s: float
    observed_s: float


class StepTime(Protocol):
    @property
    def feedback(self) -> Feedback | None:
        """Of the last interval; None where there is nothing to learn."""
        ...

    def advance(self, view: GroupView) -> float:
        """Seconds since the step began; `view.at_s` is not read."""
        ...


class WallTime:
    """`clock` prices this machine, and is corrected by what is seen."""

    def __init__(self, clock: CorrectedClock, now: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now = now
        self._started_s = now()
        self._gains = _Gains()
        self._last: tuple[float, GroupView] | None = None
        self.feedback: Feedback | None = None

    def advance(self, view: GroupView) -> float:
        at_s = self._now() - self._started_s
        num_iterations = self._gains.iterations(view)
        self.feedback = self._learn(at_s, view, num_iterations)
        self._last = (at_s, view)
        return at_s

    def _learn(self, at_s: float, view: GroupView, num_iterations: int) -> Feedback | None:
        if self._last is None or num_iterations < _MIN_ITERATIONS:
            return None
        last_s, before = self._last
        is_mixed = any(response.is_queued for rank in before.responses for response in rank)
        if before.members != view.members or is_mixed:
            return None
        observed_s = (at_s - last_s) / num_iterations
        load = load_of(before)
        # Of what was believed before this interval taught better: that is what the decisions rested on.
        learned = Feedback(predicted_s=self._clock.decode_s(load), observed_s=observed_s)
        self._clock.observe(
            num_ranks=load.num_ranks, predicted_s=self._clock.clock.decode_s(load), observed_s=observed_s
        )
        return learned


class ModelledTime:
    """Iterations are counted by the response that gained most tokens since the last view."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at_s = 0.0
        self._gains = _Gains()
        self._members: tuple[int, ...] | None = None
        self.feedback: Feedback | None = None

    def advance(self, view: GroupView) -> float:
        self._at_s += self._gains.iterations(view) * self._clock.decode_s(load_of(view))
        if self._members is not None and len(view.members) != len(self._members):
            self._at_s += self._clock.switch_s(len(self._members), len(view.members))
        self._members = view.members
        return self._at_s


class _Gains:
    """Tokens of each response at the last view."""

    def __init__(self) -> None:
        self._generated: dict[str, int] = {}

    def iterations(self, view: GroupView) -> int:
        """Since the last view."""
        generated = {r.response_id: r.generated_tokens for rank in view.responses for r in rank}
        gains = [count - self._generated.get(name, 0) for name, count in generated.items()]
        self._generated = generated
        return max(gains, default=0)


def load_of(view: GroupView) -> GroupLoad:
    """The load of the view's next decode iteration."""
    counts = [sum(not response.is_queued for response in rank) for rank in view.responses]
    contexts = [sum(response.context_tokens for response in rank) for rank in view.responses]
    return GroupLoad(
        num_ranks=len(view.members),
        num_running=sum(counts),
        max_running=max(counts),
        max_context_tokens=max(contexts),
    )
