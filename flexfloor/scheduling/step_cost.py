"""What a placed step is expected to cost under a clock, with drained ranks released. PURE.

The step is cut into at most `2 * _POINTS` spans of like load; each is priced by its middle. So the price of
thousands of responses on hundreds of ranks takes about a millisecond, and plans can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexfloor.scheduling.cost import Clock, GroupLoad
from flexfloor.scheduling.peak_kv import Tokens

_POINTS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Mean over the scenarios, in the clock's unit."""

    wall_s: float
    occupied_s: float
    """Worker-seconds: members times time, stalls of the switches included."""
    max_context_tokens: int
    """Highest context on one rank at a priced moment of any scenario; an exact peak may be higher."""

    def objective(self, price: float, num_ranks: int) -> float:
        """J = occupied + price * num_ranks * wall; lower is better."""
        # An infinite price asks for the shortest wall, and for nothing else.
        return self.wall_s if np.isinf(price) else self.occupied_s + price * num_ranks * self.wall_s


def step_cost(
    lengths: Tokens,
    starts: Tokens,
    *,
    prompt_tokens: Tokens,
    ranks: Tokens,
    sizes: Sequence[int],
    clock: Clock,
) -> StepCost:
    """Price a step that starts with the largest of `sizes` and shrinks to the others as ranks drain.

    `lengths` and `starts` [num_scenarios, num_responses] in iterations; `prompt_tokens` and `ranks`
    [num_responses], ranks below the largest size. A drained rank leaves once the ranks that still have work
    fit into a smaller size, and if the stall takes no more worker time than it can save; the smallest of
    `sizes` is the floor.
    """
    ascending = np.array(sorted(set(sizes)))
    prefill = np.bincount(ranks, weights=prompt_tokens, minlength=1).max()
    prefill_s = clock.prefill_s(int(prefill))
    walls, occupied, context = [], [], 0
    for begin, length in zip(starts, lengths, strict=True):
        spans = _Spans.of(begin, begin + length, prompt_tokens, ranks, ascending)
        wall_s, occupied_s = spans.price(clock, int(ascending[-1]))
        walls.append(wall_s + prefill_s)
        occupied.append(occupied_s + prefill_s * int(ascending[-1]))
        context = max(context, int(spans.max_context_tokens.max(initial=0)))
    return StepCost(
        wall_s=float(np.mean(walls)), occupied_s=float(np.mean(occupied)), max_context_tokens=context
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spans:
    """Arrays [num_spans]."""

    iterations: NDArray[np.float64]
    num_members: NDArray[np.int64]
    num_running: NDArray[np.int64]
    max_running: NDArray[np.int64]
    max_context_tokens: NDArray[np.int64]

    @classmethod
    def of(
        cls, starts: Tokens, ends: Tokens, prompt_tokens: Tokens, ranks: Tokens, sizes: Tokens
    ) -> "_Spans":
        num_ranks = int(sizes[-1])
        rank_ends = np.zeros(num_ranks, dtype=np.int64)
        np.maximum.at(rank_ends, ranks, ends)
        edges = _edges(ends, rank_ends)
        middles = (edges[:-1] + edges[1:]) / 2
        alive, base = _running_at(middles, starts, ends, prompt_tokens, ranks, num_ranks)
        context = base + middles[:, None] * alive
        num_busy = (rank_ends > middles[:, None]).sum(axis=1)
        members = sizes[np.searchsorted(sizes, num_busy)]
        return cls(
            iterations=np.diff(edges).astype(np.float64),
            num_members=members,
            num_running=alive.sum(axis=1),
            max_running=alive.max(axis=1),
            max_context_tokens=np.rint(context.max(axis=1)).astype(np.int64),
        )

    def price(self, clock: Clock, starting_size: int) -> tuple[float, float]:
        """Wall and occupied worker time."""
        wall_s = occupied_s = 0.0
        before = starting_size
        left = np.cumsum(self.iterations[::-1])[::-1]
        for span in range(len(self.iterations)):
            members = int(self.num_members[span])
            decode_s = clock.decode_s(self._load(span, members))
            if members != before:
                stall_s = clock.switch_s(before, members)
                if stall_s * before <= (before - members) * decode_s * left[span]:
                    wall_s += stall_s
                    occupied_s += stall_s * before
                    before = members
                else:
                    decode_s = clock.decode_s(self._load(span, before))
            took_s = float(self.iterations[span]) * decode_s
            wall_s += took_s
            occupied_s += took_s * before
        return wall_s, occupied_s

    def _load(self, span: int, num_members: int) -> GroupLoad:
        return GroupLoad(
            num_ranks=num_members,
            num_running=int(self.num_running[span]),
            max_running=int(self.max_running[span]),
            max_context_tokens=int(self.max_context_tokens[span]),
        )


def _edges(ends: Tokens, rank_ends: Tokens) -> Tokens:
    """Where spans begin and end: at quantiles of the responses' ends, and of the ranks'."""
    shares = np.linspace(0, 1, _POINTS)
    points = [np.quantile(values, shares, method="higher") for values in (ends, rank_ends[rank_ends > 0])]
    return np.unique(np.concatenate([[0], *points]))


def _running_at(
    moments: NDArray[np.float64],
    starts: Tokens,
    ends: Tokens,
    prompt_tokens: Tokens,
    ranks: Tokens,
    num_ranks: int,
) -> tuple[Tokens, NDArray[np.float64]]:
    """Running responses, and their sum of prompt less start, both [num_moments, num_ranks]."""
    num_cells = (len(moments) + 1) * num_ranks
    first = np.searchsorted(moments, starts, side="right") * num_ranks + ranks
    last = np.searchsorted(moments, ends, side="left") * num_ranks + ranks
    base = (prompt_tokens - starts).astype(np.float64)
    alive = np.bincount(first, minlength=num_cells) - np.bincount(last, minlength=num_cells)
    sums = np.bincount(first, base, minlength=num_cells) - np.bincount(last, base, minlength=num_cells)
    shape = (len(moments) + 1, num_ranks)
    return alive.reshape(shape).cumsum(axis=0)[:-1], sums.reshape(shape).cumsum(axis=0)[:-1]
