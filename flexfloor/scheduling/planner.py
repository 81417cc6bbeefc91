"""Chooses among placements over group sizes by their predicted cost and KV peak. PURE.

All plans of a step are judged on the same sampled lengths, so their differences are not noise of the draw.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexfloor.config.choices import Placement
from flexfloor.scheduling import assign
from flexfloor.scheduling.cost import Clock
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.peak_kv import peak_kv_tokens, sample_lengths, start_iterations
from flexfloor.scheduling.place import chunks
from flexfloor.scheduling.step_cost import StepCost, step_cost

_NUM_SCENARIOS = 3
_TIER_ROUNDS = 2
_TIER_FACTORS = (0.6, 0.8, 1.25, 1.6)
_TIER_SHRINK = 0.6
"""Tiers are aligned with halvings; finer ones cost search time and gain little."""
_LARGE_STEP = 2048
"""Responses above which tiers are searched for once over and on one scenario; the result is judged on all."""
_TIER_KV_SHARE = 0.85
"""Of a rank's pool that tiers may be predicted to need: they put the responses together that may run away."""
_ANY_SIZE_UP_TO = 8
"""Larger groups shrink in steps of a quarter to a third: each switch costs a stall."""

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStep:
    """A placement over the ranks 0 .. size - 1, and what is predicted of it."""

    placement: Placement
    size: int
    order: Indices
    """[num_responses]: the requests' indices in the order of submission."""
    ranks: Indices
    """[num_responses], in that order."""
    cost: StepCost
    peak_kv_tokens: Indices
    """[size], highest of the scenarios."""
    kv_capacity_tokens: int | None

    @property
    def highest_peak(self) -> int:
        return int(self.peak_kv_tokens.max())

    @property
    def fits(self) -> bool:
        return self.kv_capacity_tokens is None or self.highest_peak <= self.kv_capacity_tokens

    @property
    def kv_story(self) -> str:
        bound = "" if self.kv_capacity_tokens is None else f" of {self.kv_capacity_tokens}"
        return f"peak KV {self.highest_peak}{bound} tokens"


def shrinking_sizes(num_ranks: int, floor: int, allowed_sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Sizes of a group from `num_ranks` down, the full one always among them, none below the floor.

    Without a list: any size of a small group; else N, 3N/4, N/2, 3N/8, N/4 and so on, and the floor.
    """
    if allowed_sizes is not None:
        sizes = {size for size in allowed_sizes if floor <= size <= num_ranks}
    elif num_ranks <= _ANY_SIZE_UP_TO:
        sizes = set(range(floor, num_ranks))
    else:
        halves = [num_ranks >> shift for shift in range(num_ranks.bit_length())]
        sizes = {size for half in halves for size in (half, 3 * half // 4) if size >= floor} | {floor}
    return tuple(sorted(sizes | {num_ranks}, reverse=True))


class Planner:
    """The plans that one step may have; `choose` picks. Arrays by response are in arrival order."""

    def __init__(
        self,
        *,
        predictions: Sequence[LengthPrediction],
        prompt_tokens: Sequence[int],
        num_ranks: int,
        clock: Clock,
        kv_tokens: Callable[[int], int | None],
        running_limit: int | None,
        price: float,
        wall_budget: float,
        floor: int,
        allowed_sizes: Sequence[int] | None,
        seed: int,
    ) -> None:
        self._num_ranks = num_ranks
        self._clock = clock
        self._kv_tokens = kv_tokens
        self._running_limit = running_limit
        self._price = price
        self._wall_budget = wall_budget
        self._sizes = shrinking_sizes(num_ranks, floor, allowed_sizes)
        self._prompt_tokens = np.array(prompt_tokens, dtype=np.int64)
        rng = np.random.default_rng(seed)
        self._lengths = sample_lengths(predictions, num_scenarios=_NUM_SCENARIOS, rng=rng)
        self._expected = np.array([prediction.expected_tokens for prediction in predictions])
        self._arrival = np.arange(len(predictions), dtype=np.int64)
        self._longest_first = np.argsort(-self._expected, kind="stable")

    def choose(
        self, placement: Placement, *, is_baseline: bool, may_start_smaller: bool
    ) -> tuple[PlacedStep, str]:
        """The plan, and why it is that one."""
        base = Placement.balanced if placement is Placement.tiers else placement
        full, notes = self._fitting(base, self._num_ranks, keeps_excess=is_baseline)
        if full is None:
            return self._fall_back(notes)
        chosen = full
        if may_start_smaller:
            chosen, size_notes = self._smaller(base, full)
            notes = [*(notes if chosen is full else []), *size_notes]
        if placement is Placement.tiers:
            chosen, tier_note = self._with_tiers(chosen, full)
            notes.append(tier_note)
        start = f"{chosen.placement} over {chosen.size} of {self._num_ranks} ranks, {chosen.kv_story}"
        return chosen, "; ".join([start, *notes])

    def _fitting(
        self, placement: Placement, size: int, *, keeps_excess: bool = False
    ) -> tuple[PlacedStep | None, list[str]]:
        """The first variant of a placement that fits into the KV pools, and what was wrong with those before.

        With `keeps_excess` the first one is taken in any case.
        """
        notes: list[str] = []
        for label, placed in self._variants(placement, size):
            if placed.fits:
                return placed, [f"{label}, as {notes[-1]}"] if notes else []
            notes.append(f"{label} at size {size} would need {placed.kv_story}")
            if keeps_excess:
                return placed, ["a baseline keeps its placement although KV is predicted to run short"]
        return None, notes

    def _variants(self, placement: Placement, size: int) -> Iterator[tuple[str, PlacedStep]]:
        num_responses, order = len(self._arrival), self._longest_first
        match placement:
            case Placement.round_robin | Placement.least_inflight:
                # Without waiting, the least busy of equal ranks is the next one around.
                ranks = assign.round_robin(num_responses, size)
                yield str(placement), self._placed(placement, size, self._arrival, ranks)
                return
            case Placement.chunked:
                ranks = np.array(chunks(num_responses, size), dtype=np.int64)
                yield "chunked", self._placed(placement, size, self._arrival, ranks)
        balanced = Placement.balanced
        ranks = assign.serpentine(num_responses, size)
        yield "balanced", self._placed(balanced, size, order, ranks)
        tokens = (self._expected + self._prompt_tokens)[order].astype(np.float64)
        yield "levelled by tokens", self._placed(balanced, size, order, assign.level(tokens, size))

    def _smaller(self, placement: Placement, full: PlacedStep) -> tuple[PlacedStep, list[str]]:
        """The size of least J within the throughput guard.

        The search ends at the first size that fails: wall time and KV get worse from there on.
        """
        best, notes, stopped = full, [], ""
        for size in self._sizes[1:]:
            placed, kv_notes = self._fitting(placement, size)
            if placed is None:
                stopped = kv_notes[-1]
                break
            if placed.cost.wall_s > (1 + self._wall_budget) * full.cost.wall_s:
                stopped = (
                    f"size {size} would take {_more(placed.cost.wall_s, full.cost.wall_s)} wall time, "
                    f"the guard allows {self._wall_budget:+.0%}"
                )
                break
            if self._objective(placed) < self._objective(best):
                best, notes = placed, kv_notes
        if best is not full:
            notes = [*notes, f"{_against(best, full)} against all ranks"]
        return best, [*notes, stopped] if stopped else notes

    def _with_tiers(self, balanced: PlacedStep, full: PlacedStep) -> tuple[PlacedStep, str]:
        """Tiers on the chosen size, where they lower J within the guard; else what was chosen."""
        sizes = _about_halves(self._sizes_from(balanced.size))
        if len(sizes) < 2:
            return balanced, "no tiers: the group cannot shrink any further"
        best = self._search_tiers(balanced, full, assign.tier_widths(sizes))
        if best is None:
            return balanced, (
                f"no tiers: none lowers the cost within {1 + self._wall_budget:.0%} of the wall time and "
                f"{_TIER_KV_SHARE:.0%} of the KV pool"
            )
        return best, f"{_against(best, balanced)} against balanced"

    def _search_tiers(
        self, balanced: PlacedStep, full: PlacedStep, widths: tuple[int, ...]
    ) -> PlacedStep | None:
        """Coordinate search over the tiers' shares of the responses, from equal counts on every rank."""
        latest_s = (1 + self._wall_budget) * full.cost.wall_s
        capacity = balanced.kv_capacity_tokens
        room = np.inf if capacity is None else _TIER_KV_SHARE * capacity
        order = self._longest_first
        is_large = len(order) > _LARGE_STEP
        num_scenarios, num_rounds = (1, 1) if is_large else (_NUM_SCENARIOS, _TIER_ROUNDS)

        def score(shares: Sequence[float]) -> float:
            ranks = assign.tiers(len(order), widths, shares)
            cost, _ = self._cost(order, ranks, balanced.size, num_scenarios)
            if cost.wall_s > latest_s or cost.max_context_tokens > room:
                return np.inf
            return cost.objective(self._price, self._num_ranks)

        shares = [float(width) for width in widths]
        least = score(shares)
        for tier in [*range(len(widths))] * num_rounds:
            trials = [_scaled(shares, tier, factor) for factor in _TIER_FACTORS]
            scores = [score(trial) for trial in trials]
            if min(scores) < least:
                least = min(scores)
                shares = trials[scores.index(least)]
        best = self._placed(Placement.tiers, balanced.size, order, assign.tiers(len(order), widths, shares))
        is_within = best.highest_peak <= room and best.cost.wall_s <= latest_s
        return best if is_within and self._objective(best) < self._objective(balanced) else None

    def _fall_back(self, notes: Sequence[str]) -> tuple[PlacedStep, str]:
        ranks = assign.round_robin(len(self._arrival), self._num_ranks)
        placed = self._placed(Placement.round_robin, self._num_ranks, self._arrival, ranks)
        return placed, (
            f"round_robin over all {self._num_ranks} ranks, {placed.kv_story}: no plan fits "
            f"({'; '.join(notes)}), so the engine's retraction has to handle it"
        )

    def _placed(self, placement: Placement, size: int, order: Indices, ranks: Indices) -> PlacedStep:
        cost, starts = self._cost(order, ranks, size)
        peaks = peak_kv_tokens(
            self._lengths[:, order],
            starts,
            prompt_tokens=self._prompt_tokens[order],
            ranks=ranks,
            num_ranks=size,
        )
        return PlacedStep(
            placement=placement,
            size=size,
            order=order,
            ranks=ranks,
            cost=cost,
            peak_kv_tokens=peaks.max(axis=0),
            kv_capacity_tokens=self._kv_tokens(size),
        )

    def _cost(
        self, order: Indices, ranks: Indices, size: int, num_scenarios: int = _NUM_SCENARIOS
    ) -> tuple[StepCost, Indices]:
        lengths = self._lengths[:num_scenarios, order]
        starts = start_iterations(lengths, ranks, num_ranks=size, running_limit=self._running_limit)
        cost = step_cost(
            lengths,
            starts,
            prompt_tokens=self._prompt_tokens[order],
            ranks=ranks,
            sizes=self._sizes_from(size),
            clock=self._clock,
        )
        return cost, starts

    def _sizes_from(self, size: int) -> tuple[int, ...]:
        return tuple(smaller for smaller in self._sizes if smaller <= size)

    def _objective(self, placed: PlacedStep) -> float:
        return placed.cost.objective(self._price, self._num_ranks)


def _scaled(shares: Sequence[float], index: int, factor: float) -> list[float]:
    return [share * factor if at == index else share for at, share in enumerate(shares)]


def _about_halves(sizes: Sequence[int]) -> tuple[int, ...]:
    """Of descending sizes the first, the last, and between them each that is well below the one before."""
    kept = [sizes[0]]
    for size in sizes[1:-1]:
        if size <= _TIER_SHRINK * kept[-1]:
            kept.append(size)
    return tuple(dict.fromkeys([*kept, sizes[-1]]))


def _against(placed: PlacedStep, reference: PlacedStep) -> str:
    occupied = _more(placed.cost.occupied_s, reference.cost.occupied_s)
    wall = _more(placed.cost.wall_s, reference.cost.wall_s)
    return f"predicted occupied time {occupied} and wall time {wall}"


def _more(value: float, reference: float) -> str:
    return f"{value / reference - 1:+.1%}" if reference > 0 else f"{value:+.3g}"
