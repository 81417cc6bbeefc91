"""Loads of iterations as arrays, and clocks that price them at once. PURE.

Fractions are allowed: an expectation is a load too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexfloor.scheduling.cost import Clock, GroupLoad

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Many `GroupLoad`s; every array is [n], float."""

    num_ranks: Floats
    num_running: Floats
    max_running: Floats
    max_context_tokens: Floats

    @classmethod
    def of(cls, load: GroupLoad) -> "Loads":
        """One load, n = 1."""
        values = (load.num_ranks, load.num_running, load.max_running, load.max_context_tokens)
        ranks, running, most, context = (np.array([value], dtype=np.float64) for value in values)
        return cls(num_ranks=ranks, num_running=running, max_running=most, max_context_tokens=context)


class VectorClock(Clock, Protocol):
    """A clock that prices arrays of loads at once."""

    def decode_many_s(self, loads: Loads) -> Floats:
        """[n], as `decode_s` of each."""
        ...


def decode_many_s(clock: Clock, loads: Loads) -> Floats:
    """[n], through the clock's own arrays where it has them, else one by one with rounded loads."""
    # Not isinstance: for a protocol that takes longer than the arithmetic.
    at_once: Callable[[Loads], Floats] | None = getattr(clock, "decode_many_s", None)
    if at_once is not None:
        return at_once(loads)
    columns = (loads.num_ranks, loads.num_running, loads.max_running, loads.max_context_tokens)
    rows, inverse = np.unique(
        np.rint(np.stack(columns, axis=1)).astype(np.int64), axis=0, return_inverse=True
    )
    seconds = [clock.decode_s(_load(*(int(value) for value in row))) for row in rows]
    return np.array(seconds, dtype=np.float64)[inverse.reshape(-1)]


def _load(num_ranks: int, num_running: int, max_running: int, max_context_tokens: int) -> GroupLoad:
    return GroupLoad(
        num_ranks=num_ranks,
        num_running=num_running,
        max_running=max_running,
        max_context_tokens=max_context_tokens,
    )
