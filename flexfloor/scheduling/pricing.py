"""A schedule that ran, or was simulated, priced under a clock. PURE."""

from dataclasses import dataclass

import numpy as np

from flexfloor.iterations import StepIterations
from flexfloor.scheduling.cost import Clock
from flexfloor.scheduling.loads import Floats, Loads, decode_many_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStep:
    """Times in the clock's unit. wall_s = decode_s + prefill_s + switch_s."""

    wall_s: float
    occupied_worker_s: float
    """Members times time, in a switch the members before it."""
    decode_s: float
    prefill_s: float
    """What iterations took longer for prefilling."""
    switch_s: float
    num_switches: int
    full_size: int
    rejoin_s: float
    """What it would take to bring all back at the end; outside `wall_s`, for it hides behind the training."""

    @property
    def occupied_share(self) -> float:
        """Of what a group of `full_size` ranks holds over the same wall time."""
        return self.occupied_worker_s / (self.full_size * self.wall_s) if self.wall_s else 1.0


def price(iterations: StepIterations, clock: Clock, *, full_size: int) -> PricedStep:
    """Price a step; one that starts with fewer than `full_size` members pays for that switch first."""
    members = iterations.is_member.sum(axis=1)
    if members.size == 0:
        return _nothing(full_size)
    if members.min() < 1 or members.max() > full_size:
        raise ValueError(f"{members.min()} to {members.max()} members, full_size={full_size}")
    decode = iterations.repeats * decode_many_s(clock, _loads(iterations, members))
    prefill = _prefill_s(iterations, clock)
    before, stalls = _switches(iterations, clock, members, full_size)
    wall = float(decode.sum() + prefill.sum() + stalls.sum())
    occupied = float((members * (decode + prefill)).sum() + (before * stalls).sum())
    last = int(members[-1])
    return PricedStep(
        wall_s=wall,
        occupied_worker_s=occupied,
        decode_s=float(decode.sum()),
        prefill_s=float(prefill.sum()),
        switch_s=float(stalls.sum()),
        num_switches=iterations.num_switches + int(members[0] != full_size),
        full_size=full_size,
        rejoin_s=clock.switch_s(last, full_size) if last < full_size else 0.0,
    )


def _loads(iterations: StepIterations, members: Floats) -> Loads:
    return Loads(
        num_ranks=members.astype(np.float64),
        num_running=iterations.num_running.sum(axis=1).astype(np.float64),
        max_running=iterations.num_running.max(axis=1).astype(np.float64),
        max_context_tokens=iterations.context_tokens.max(axis=1).astype(np.float64),
    )


def _prefill_s(iterations: StepIterations, clock: Clock) -> Floats:
    """[num_rows]"""
    most = iterations.prefill_tokens.max(axis=1)
    sizes, inverse = np.unique(most, return_inverse=True)
    seconds = np.array([clock.prefill_s(int(size)) if size else 0.0 for size in sizes], dtype=np.float64)
    return iterations.repeats * seconds[inverse.reshape(-1)]


def _switches(
    iterations: StepIterations, clock: Clock, members: Floats, full_size: int
) -> tuple[Floats, Floats]:
    """Members before each row, and the stall before it; [num_rows] each."""
    before = np.concatenate(([full_size], members[:-1]))
    is_switch = np.concatenate(
        ([members[0] != full_size], (iterations.is_member[1:] != iterations.is_member[:-1]).any(axis=1))
    )
    stalls = np.zeros(members.shape[0])
    for row in np.flatnonzero(is_switch):
        stalls[row] = clock.switch_s(int(before[row]), int(members[row]))
    return before, stalls


def _nothing(full_size: int) -> PricedStep:
    return PricedStep(
        wall_s=0.0,
        occupied_worker_s=0.0,
        decode_s=0.0,
        prefill_s=0.0,
        switch_s=0.0,
        num_switches=0,
        full_size=full_size,
        rejoin_s=0.0,
    )
