"""Expected cost of the rest of a step with this or that group, now or a little later. PURE."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flexfloor.scheduling.candidates import AllowedSets, Candidate
from flexfloor.scheduling.cost import Clock
from flexfloor.scheduling.loads import Floats, Loads, decode_many_s
from flexfloor.scheduling.outlook import Outlook, RankSums, loads, summed

_KV_SHARE = 0.9
"""Of a pool that expected context may fill; the rest is for responses that grow longer than expected."""
_KV_GROWTH_TOKENS = 256.0
"""What each response of a survivor must have room for at once."""
_BUDGET_CHANCES = (0.5, 0.1)
"""The budget must hold if the step ends at its median, and at its 90th percentile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The step goes on with one group, whose ranks leave as they drain; arrays are [k], by cell."""

    num_members: Floats
    iteration_s: Floats
    span_s: Floats
    """Time in the cell, given that the step runs on."""
    cost: Floats
    """Expected (members + price x full size) x time in the cell."""

    @property
    def total(self) -> float:
        return float(self.cost.sum())

    def cost_before(self) -> Floats:
        """[k] cost of all cells before each."""
        return np.concatenate([[0.0], np.cumsum(self.cost)[:-1]])

    def cost_from(self) -> Floats:
        """[k] cost of each cell and all after it."""
        return np.cumsum(self.cost[::-1])[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Wall time that moving may cost."""

    share: float
    """Of the wall time without any order."""
    lost_s: float
    passed_s: float
    """Wall time so far, had there been no order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A candidate with its course from any cell on; arrays are [k]."""

    candidate: Candidate
    course: Course
    stall_s: Floats
    """Of the switch and the prefill, were it carried out at the beginning of the cell."""
    is_within_pool: NDArray[np.bool_]
    is_within_budget: NDArray[np.bool_]

    @property
    def may(self) -> NDArray[np.bool_]:
        return self.is_within_pool & self.is_within_budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Courses:
    """Everything that a decision compares."""

    stay: Course
    unmoved: Course
    """The full group with every response where it began: what a static group would take."""
    options: tuple[Option, ...]
    stall_s: Floats
    """[options, k]"""
    cost_from: Floats
    """[options, k]; infinite where the option may not be carried out at the beginning of the cell."""

    def later_costs(self, before: Course, outlook: Outlook, price_ranks: float) -> Floats:
        """[options, k] cost of the rest, with `before` up to the cell and the option from then on."""
        weight = (before.num_members + price_ranks) * outlook.runs_on
        return before.cost_before() + self.stall_s * weight + self.cost_from


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """What stays the same over a step."""

    clock: Clock
    num_ranks: int
    floor: int
    price: float
    allowed: AllowedSets
    kv_tokens: Callable[[int], int | None]

    @property
    def price_ranks(self) -> float:
        return self.price * self.num_ranks


def price_courses(
    pricing: Pricing,
    outlook: Outlook,
    sums: RankSums,
    unmoved: RankSums,
    found: Sequence[Candidate],
    *,
    members: tuple[int, ...],
    budget: Budget | None,
) -> Courses:
    after = [sums.moved(outlook, one.movers, one.targets) for one in found]
    can_drain = [len(one.survivors) for one in found if not one.movers]
    groups = [members, *(one.survivors for one in found)]
    sizes = [np.full(outlook.num_cells, float(pricing.num_ranks))]
    sizes += [
        _members(pricing, outlook, each, group, needs_order=min(can_drain, default=len(group)) < len(group))
        for each, group in zip([sums, *after], groups, strict=True)
    ]
    every = [unmoved, sums, *after]
    static, stay, *rest = _courses(
        pricing, outlook, [loads(outlook, *pair) for pair in zip(every, sizes, strict=True)]
    )
    options = []
    for one, course, moved in zip(found, rest, after, strict=True):
        stall_s = _stall_s(pricing, outlook, one, len(members), stay)
        fits = np.ones(outlook.num_cells, dtype=np.bool_)
        if one.movers and budget is not None:
            fits = _within_budget(budget, outlook, stay, course, static, stall_s)
        options.append(
            Option(
                candidate=one,
                course=course,
                stall_s=stall_s,
                is_within_pool=_within_pool(pricing, outlook, one, moved),
                is_within_budget=fits,
            )
        )
    shape = (len(options), outlook.num_cells)
    costs_from = [np.where(one.may, one.course.cost_from(), math.inf) for one in options]
    return Courses(
        stay=stay,
        unmoved=static,
        options=tuple(options),
        stall_s=np.array([one.stall_s for one in options]).reshape(shape),
        cost_from=np.array(costs_from).reshape(shape),
    )


def _members(
    pricing: Pricing, outlook: Outlook, sums: RankSums, group: tuple[int, ...], *, needs_order: bool
) -> Floats:
    """[k] expected size of the group while its ranks leave as they drain.

    `needs_order`: those that are drained already could leave, but stay until they are told to.
    """
    if pricing.allowed.members is not None:
        return _members_of_sets(pricing, outlook, sums, frozenset(group))
    held = sum(not sums.count[rank].any() for rank in group) if needs_order else 0
    busy = sums.busy().sum(axis=0) / outlook.runs_on
    members = np.clip(busy + held, min(pricing.floor, len(group)), len(group))
    if pricing.allowed.sizes is None:
        return np.asarray(members, dtype=np.float64)
    smaller = {size for size in pricing.allowed.sizes if size < len(group)}
    steps = np.array(sorted(smaller | {len(group)}), dtype=np.float64)
    return np.asarray(steps[np.searchsorted(steps, members - 1e-6)], dtype=np.float64)


def _members_of_sets(pricing: Pricing, outlook: Outlook, sums: RankSums, group: frozenset[int]) -> Floats:
    """[k] as above, where the group shrinks to one of a list of sets when all outside of it has drained."""
    all_done = sums.log_done.sum(axis=0)
    reached: dict[int, Floats] = {}
    for members in pricing.allowed.members or ():
        outside = sorted(group - members)
        if not members < group or len(members) < pricing.floor or not sums.count[outside].any():
            continue
        done = sums.log_done[outside].sum(axis=0)
        chance = np.clip(np.exp(done) * -np.expm1(all_done - done) / outlook.runs_on, 0.0, 1.0)
        reached[len(members)] = np.maximum(chance, reached.get(len(members), 0.0))
    size, at_most = np.full(outlook.num_cells, float(len(group))), np.zeros(outlook.num_cells)
    steps = sorted(reached)
    for smaller, larger in pairwise([*steps, len(group)]):
        at_most = np.maximum(at_most, reached[smaller])
        size -= (larger - smaller) * at_most
    return size


def _courses(pricing: Pricing, outlook: Outlook, each: Sequence[Loads]) -> list[Course]:
    names = ("num_ranks", "num_running", "max_running", "max_context_tokens")
    together = Loads(**{name: np.concatenate([getattr(one, name) for one in each]) for name in names})
    seconds = decode_many_s(pricing.clock, together).reshape(len(each), outlook.num_cells)
    found = []
    for load, iteration_s in zip(each, seconds, strict=True):
        span_s = iteration_s * outlook.widths
        cost = (load.num_ranks + pricing.price_ranks) * span_s * outlook.runs_on
        found.append(Course(num_members=load.num_ranks, iteration_s=iteration_s, span_s=span_s, cost=cost))
    return found


def _stall_s(pricing: Pricing, outlook: Outlook, one: Candidate, num_members: int, stay: Course) -> Floats:
    """[k] the survivor with most to prefill holds up all; prefilling takes it an iteration of its own."""
    stall_s = np.full(outlook.num_cells, pricing.clock.switch_s(num_members, len(one.survivors)))
    if not one.movers:
        return stall_s
    movers = np.array(one.movers)
    context = outlook.context[movers] / outlook.runs_on
    context[:, 0] = outlook.contexts[movers]
    new_tokens = summed(context, np.array(one.targets))[1].max(axis=0)
    moves_any = -np.expm1(outlook.log_done[movers].sum(axis=0))
    prefill_s = np.array([pricing.clock.prefill_s(math.ceil(count)) for count in new_tokens.tolist()])
    return np.asarray(stall_s + prefill_s + moves_any * stay.iteration_s, dtype=np.float64)


def _within_pool(pricing: Pricing, outlook: Outlook, one: Candidate, moved: RankSums) -> NDArray[np.bool_]:
    """[k] whether the survivors' contexts fit their smaller pools from the cell on."""
    capacity = pricing.kv_tokens(len(one.survivors))
    if capacity is None:
        return np.ones(outlook.num_cells, dtype=np.bool_)
    if outlook.longest_tokens > capacity:
        return np.zeros(outlook.num_cells, dtype=np.bool_)
    expected = moved.context.max(axis=0)
    highest = np.maximum.accumulate(expected[::-1])[::-1]
    fullest = (moved.context + _KV_GROWTH_TOKENS * moved.count).max(axis=0)
    return np.asarray((highest <= _KV_SHARE * capacity) & (fullest <= capacity), dtype=np.bool_)


def _within_budget(
    budget: Budget, outlook: Outlook, stay: Course, course: Course, static: Course, stall_s: Floats
) -> NDArray[np.bool_]:
    """[k] whether carrying it out at the beginning of a cell keeps the wall time within bounds."""
    fits = np.ones(outlook.num_cells, dtype=np.bool_)
    cells = np.arange(outlook.num_cells)
    before, after = np.zeros(outlook.num_cells + 1), np.zeros(outlook.num_cells + 1)
    np.cumsum(stay.span_s - static.span_s, out=before[1:])
    np.cumsum(course.span_s - static.span_s, out=after[1:])
    at_start_s = budget.lost_s + before[:-1] + stall_s - after[:-1]
    for chance in _BUDGET_CHANCES:
        end = outlook.cell_of(chance)
        allowed_s = budget.share * (budget.passed_s + float(static.span_s[: end + 1].sum()))
        fits &= (cells > end) | (at_start_s + after[end + 1] <= allowed_s)
    return fits
