"""Ways to deal responses, sorted longest first, to ranks 0 .. num_ranks - 1. PURE.

Each returns the rank of every response, [num_responses], in the sorted order.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]


def round_robin(num_responses: int, num_ranks: int) -> Ranks:
    return np.arange(num_responses, dtype=np.int64) % num_ranks


def serpentine(num_responses: int, num_ranks: int) -> Ranks:
    """There and back over the ranks: even counts, and each rank's sum stays near the mean."""
    index = np.arange(num_responses, dtype=np.int64)
    column = index % num_ranks
    return np.where(index // num_ranks % 2 == 0, column, num_ranks - 1 - column)


def level(tokens: NDArray[np.float64], num_ranks: int) -> Ranks:
    """Even counts, and in every row of `num_ranks` responses the one with most tokens goes to the rank with
    fewest so far: closer to even sums than `serpentine` where `tokens` do not fall smoothly."""
    sums = np.zeros(num_ranks)
    ranks = np.empty(len(tokens), dtype=np.int64)
    for begin in range(0, len(tokens), num_ranks):
        row = tokens[begin : begin + num_ranks]
        emptiest = np.argsort(sums, kind="stable")[: len(row)]
        longest = np.argsort(-row, kind="stable")
        ranks[begin + longest] = emptiest
        sums[emptiest] += row[longest]
    return ranks


def tiers(num_responses: int, tier_ranks: Sequence[int], shares: Sequence[float]) -> Ranks:
    """Tiers of neighbouring ranks from rank 0 on, the longest responses in the first.

    `tier_ranks`: ranks of each tier; `shares`: of the responses that each takes, in any unit. Within a tier
    serpentine.
    """
    bounds = np.rint(np.cumsum(shares) / np.sum(shares) * num_responses).astype(np.int64)
    ranks = np.empty(num_responses, dtype=np.int64)
    begin, first_rank = 0, 0
    for end, width in zip(bounds, tier_ranks, strict=True):
        ranks[begin:end] = first_rank + serpentine(int(end) - begin, width)
        begin, first_rank = int(end), first_rank + width
    return ranks


def tier_widths(sizes: Sequence[int]) -> tuple[int, ...]:
    """Ranks of each tier, so that every size in `sizes` is a number of whole tiers from rank 0."""
    ascending = sorted(set(sizes))
    return tuple(size - before for before, size in zip([0, *ascending[:-1]], ascending, strict=True))
