"""Balanced placement for a driver that hands out work in pieces, over the ranks of several servers. PURE.

Even counts first, then even tokens: responses of one batch are dealt longest first, each to the rank with
fewest responses and, among those, fewest expected tokens. That is `scheduling.assign.level` continued over
batches, from whatever is still running.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Seat:
    """A rank of one server."""

    url: str
    dp_rank: int


@dataclass(slots=True)
class _Load:
    num_responses: int = 0
    tokens: float = 0.0


class Spread:
    """Responses that run, by seat. Only open seats take new ones."""

    def __init__(self, seats: Collection[Seat]) -> None:
        self._loads: dict[Seat, _Load] = {}
        self._open: list[Seat] = []
        self.open(seats)

    @property
    def counts(self) -> dict[Seat, int]:
        """Unfinished responses of every seat that was ever open."""
        return {seat: load.num_responses for seat, load in self._loads.items()}

    def open(self, seats: Collection[Seat]) -> None:
        """From now on these seats, and no others, take new responses. ValueError where there is none."""
        if not seats:
            raise ValueError("no seats: no server has a rank that takes requests")
        self._open = sorted(set(seats))
        for seat in self._open:
            self._loads.setdefault(seat, _Load())

    def place(self, expected_tokens: Sequence[float]) -> list[Seat]:
        """A seat for each response, in the order given; each counts there until `finish`."""
        seats: dict[int, Seat] = {}
        for index in sorted(range(len(expected_tokens)), key=lambda one: -expected_tokens[one]):
            seat = min(self._open, key=self._fullness)
            self._loads[seat].num_responses += 1
            self._loads[seat].tokens += expected_tokens[index]
            seats[index] = seat
        return [seats[index] for index in range(len(expected_tokens))]

    def finish(self, seat: Seat, expected_tokens: float) -> None:
        """A response that `place` put there, with the tokens given there, has ended."""
        load = self._loads[seat]
        if load.num_responses == 0:
            raise ValueError(f"{seat}: a response finished that was never placed there")
        load.num_responses -= 1
        load.tokens = load.tokens - expected_tokens if load.num_responses else 0.0

    def _fullness(self, seat: Seat) -> tuple[int, float]:
        load = self._loads[seat]
        return load.num_responses, load.tokens
