"""Scales and ticks of charts, and how numbers are written on them. PURE."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Maps `low .. high` to the pixels `start .. end`; a flat range gets a width."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high)) or self.low > self.high:
            raise ValueError(f"an axis from {self.low} to {self.high}")
        if self.is_log and self.low <= 0:
            raise ValueError(f"a logarithmic axis from {self.low}")

    def at(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        value = math.log(max(value, self.low)) if self.is_log else value
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        return log_ticks(self.low, self.high, most) if self.is_log else ticks(self.low, self.high, most)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values from `low` to `high`, at most about `most` of them."""
    if high <= low:
        return [low]
    step = nice_step((high - low) / max(1, most - 1))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Of 1, 2, 5 times a power of ten those between `low` and `high`, thinned to powers where too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [factor * 10.0**power for power in powers for factor in factors]
        found = [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(found) <= most:
            return found or [low, high]
    return found[:: -(-len(found) // most)]


def nice_step(least: float) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))


def tick_labels(values: Sequence[float]) -> list[str]:
    """Ticks with as many digits as tell neighbours apart."""
    labels = [short(value) for value in values]
    steps = [high - low for low, high in itertools.pairwise(values)]
    is_even = bool(steps) and max(steps) - min(steps) <= 1e-3 * max(steps)
    if not is_even or (steps[0] >= 1 and len(set(labels)) == len(labels)):
        return labels
    digits = next(count for count in range(20) if abs(round(steps[0], count) - steps[0]) <= 1e-3 * steps[0])
    return [f"{value:.{digits}f}" for value in values]


def padded(values: list[float], share: float = 0.06, *, floor: float | None = None) -> tuple[float, float]:
    """Range of the values with some air; never below `floor` (and then without air there)."""
    low, high = min(values), max(values)
    air = (high - low) * share or abs(high) * share or 1.0
    lower = low - air
    return (lower if floor is None else max(floor, lower)), high + air


def short(value: float) -> str:
    """For ticks and table cells: three or four significant digits, thousands as `12.3k`."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    for limit, divisor, suffix in ((9.9995e8, 1e9, "G"), (9.9995e5, 1e6, "M"), (9999.5, 1e3, "k")):
        if size >= limit:
            return f"{value / divisor:.3g}{suffix}"
    if size >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.3g}"
