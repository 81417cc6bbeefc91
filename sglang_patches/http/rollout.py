"""One rollout step as a foreign driver marks it: when it ran, who was there, what it took. PURE."""

from collections.abc import Mapping
from dataclasses import dataclass

from flexfloor.membership.status import RolloutFigures


class Presence:
    """Who was a member when. Times are seconds on the manager's clock."""

    def __init__(self, members: tuple[int, ...], at_s: float) -> None:
        self._changes: list[tuple[float, tuple[int, ...]]] = [(at_s, members)]

    def change(self, members: tuple[int, ...], at_s: float) -> None:
        self._changes.append((max(at_s, self._changes[-1][0]), members))

    def forget_before(self, at_s: float) -> None:
        """Keep the change that was in force then, and later ones."""
        last = max(
            (i for i, (changed_at_s, _) in enumerate(self._changes) if changed_at_s <= at_s), default=0
        )
        self._changes = self._changes[last:]

    def occupied_s(self, from_s: float, to_s: float) -> float:
        """Sum over members of their time in between."""
        total_s = 0.0
        for index, (began_s, members) in enumerate(self._changes):
            ended_s = self._changes[index + 1][0] if index + 1 < len(self._changes) else to_s
            total_s += len(members) * max(0.0, min(ended_s, to_s) - max(began_s, from_s))
        return total_s

    def num_left(self, from_s: float, to_s: float) -> int:
        """Members that left in between."""
        steps = zip(self._changes, self._changes[1:], strict=False)
        return sum(len({*old} - {*new}) for (_, old), (at_s, new) in steps if from_s < at_s <= to_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStart:
    """A step that runs."""

    rollout_step: int | None
    at_s: float
    num_tokens: int
    iterations: Mapping[int, int]
    """dp_rank -> iterations so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEnd:
    """The moment of its end; ranks that came back afterwards do not count in it."""

    at_s: float
    num_tokens: int
    membership_epoch: int
    occupied_worker_s: float
    num_releases: int


def figures(
    start: RolloutStart, end: RolloutEnd, iterations: Mapping[int, int], num_ranks: int
) -> RolloutFigures:
    """`iterations`: counters once everybody is back."""
    taken = {
        rank: iterations[rank] - before for rank, before in start.iterations.items() if rank in iterations
    }
    is_complete = bool(taken) and taken.keys() == start.iterations.keys()
    return RolloutFigures(
        wall_s=end.at_s - start.at_s,
        occupied_worker_s=end.occupied_worker_s,
        static_occupied_worker_s=num_ranks * (end.at_s - start.at_s),
        response_tokens=end.num_tokens - start.num_tokens,
        worker_iterations=sum(taken.values()) if is_complete else None,
        static_worker_iterations=len(taken) * max(taken.values()) if is_complete else None,
        num_releases=end.num_releases,
        membership_epoch=end.membership_epoch,
    )
