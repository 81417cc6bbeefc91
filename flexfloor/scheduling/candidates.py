"""Which smaller groups are worth pricing, and where their leavers' responses would go. PURE."""

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flexfloor.scheduling.decision import GroupView
from flexfloor.scheduling.outlook import Outlook

MAX_MOVES = 256
"""In one decision."""
_MAX_SIZES = 8
_NEW_TOKEN_WEIGHT = 3
"""A token to be prefilled beside one that is only read in each iteration: all survivors wait for it."""


@dataclass(frozen=True, slots=True)
class AllowedSets:
    """Which member sets the group may shrink to: any, those of some sizes, or a list of sets."""

    sizes: frozenset[int] | None = None
    members: tuple[frozenset[int], ...] | None = None

    @classmethod
    def any(cls) -> "AllowedSets":
        return cls()

    @classmethod
    def of_sizes(cls, sizes: Iterable[int]) -> "AllowedSets":
        return cls(sizes=frozenset(sizes))

    @classmethod
    def of_members(cls, sets: Iterable[Collection[int]]) -> "AllowedSets":
        return cls(members=tuple(frozenset(members) for members in sets))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A group to shrink to. `movers` are positions in the outlook, `targets` their new ranks."""

    survivors: tuple[int, ...]
    leavers: tuple[int, ...]
    movers: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What every candidate keeps to."""

    floor: int
    min_change: int
    allowed: AllowedSets
    may_move: bool
    kept: frozenset[int]
    """Members that do not leave."""


def candidates(
    view: GroupView, outlook: Outlook, bounds: Bounds, *, response_weight_tokens: float
) -> list[Candidate]:
    """At most one for each size, larger groups first.

    Drained ranks leave first, then those with the least context to move; a rank with a queue stays, for what
    it waits for is its own place. `response_weight_tokens`: context tokens that take as long as one response.
    """
    by_rank = np.bincount(outlook.rank_of, outlook.contexts, minlength=view.num_ranks)
    context: list[float] = by_rank.tolist()
    drained = frozenset(rank for rank in view.members if not view.responses[rank])
    fixed = bounds.kept | _without_move(view, outlook, bounds)
    found = []
    for survivors in _survivor_sets(view, bounds, context, drained):
        gone = tuple(rank for rank in view.members if rank not in survivors)
        if not fixed.isdisjoint(gone) or sum(len(view.responses[rank]) for rank in gone) > MAX_MOVES:
            continue
        leaves = np.zeros(view.num_ranks, dtype=np.bool_)
        leaves[list(gone)] = True
        movers = np.flatnonzero(leaves[outlook.rank_of])
        order = movers[np.argsort(-outlook.contexts[movers], kind="stable")].tolist()
        targets = _assign(view, outlook, order, survivors, context, response_weight_tokens)
        found.append(
            Candidate(
                survivors=tuple(sorted(survivors)), leavers=gone, movers=tuple(order), targets=tuple(targets)
            )
        )
    return found


def _survivor_sets(
    view: GroupView, bounds: Bounds, context: Sequence[float], drained: Collection[int]
) -> list[frozenset[int]]:
    most = len(view.members) - bounds.min_change
    members = frozenset(view.members)
    if bounds.allowed.members is not None:
        fitting = [
            one for one in bounds.allowed.members if one < members and bounds.floor <= len(one) <= most
        ]
        return sorted(
            fitting, key=lambda one: (-len(one), sum(context[rank] for rank in members - one), sorted(one))
        )
    # Among equals the highest ranks go, so that a replay and the next step find the same ones.
    order = sorted(
        view.members, key=lambda rank: (rank in bounds.kept, rank not in drained, context[rank], -rank)
    )
    sizes = [size for size in range(most, bounds.floor - 1, -1)]
    if bounds.allowed.sizes is not None:
        sizes = [size for size in sizes if size in bounds.allowed.sizes]
    return [frozenset(order[len(order) - size :]) for size in _thinned(sizes, len(order) - len(drained))]


def _thinned(sizes: list[int], drained_size: int) -> list[int]:
    """A few of many sizes, evenly by ratio; the one that takes just the drained ranks is among them."""
    if len(sizes) <= _MAX_SIZES:
        return sizes
    wanted = np.geomspace(sizes[0], sizes[-1], _MAX_SIZES - 1)
    # Ascending, so that the smaller one wins among equals.
    rising = np.array(sizes[::-1])
    chosen = set(rising[np.abs(rising - wanted[:, None]).argmin(axis=1)].tolist())
    chosen.add(min(sizes, key=lambda size: (size < drained_size, abs(size - drained_size))))
    return sorted(chosen, reverse=True)


def _without_move(view: GroupView, outlook: Outlook, bounds: Bounds) -> frozenset[int]:
    """Ranks whose responses stay where they are: all, or those of ranks with a queue."""
    if not bounds.may_move:
        return frozenset(rank for rank in view.members if view.responses[rank])
    return frozenset(int(rank) for rank in outlook.rank_of[outlook.contexts == 0])


def _assign(
    view: GroupView,
    outlook: Outlook,
    order: Sequence[int],
    survivors: Collection[int],
    context: Sequence[float],
    response_weight_tokens: float,
) -> list[int]:
    """Longest first, each to the survivor that it leaves least loaded."""
    heap = [
        (context[rank] + response_weight_tokens * len(view.responses[rank]), rank)
        for rank in sorted(survivors)
    ]
    heapq.heapify(heap)
    added = (1 + _NEW_TOKEN_WEIGHT) * outlook.contexts[list(order)] + response_weight_tokens
    targets = []
    for more in added.tolist():
        load, rank = heap[0]
        targets.append(rank)
        heapq.heapreplace(heap, (load + more, rank))
    return targets
