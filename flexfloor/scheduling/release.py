"""Release: which ranks leave the EP group now, and what moves before. PURE: views in, orders out.

Rule 1: what counts is J = occupied worker time + price x full size x wall time, over the rest of the step.
Rule 2: the rest is an expectation over every response's own length distribution, not one number: load falls
as responses end, ranks drain and leave by themselves, and the step may end early (`outlook`).
Rule 3: to shrink now must beat to stay, and also to do it later: what is nearly done is not worth its
prefill, and while load falls a smaller group gets cheaper.
Rule 4: the wall time that moves cost is bounded against the same step without any order, that which has
passed and that to come, at the median and at the 90th percentile of when the step ends (`courses`).
Rule 5: drained ranks leave without that bound: they cost no prefill, and no response gets new neighbours.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import sub

import numpy as np

from flexfloor.scheduling.candidates import AllowedSets as AllowedSets
from flexfloor.scheduling.candidates import Bounds, candidates
from flexfloor.scheduling.cost import Clock
from flexfloor.scheduling.courses import Budget, Course, Courses, Option, Pricing, price_courses
from flexfloor.scheduling.decision import GroupView, Move, ReleaseDecision, ReleasePolicy
from flexfloor.scheduling.loads import Loads, decode_many_s
from flexfloor.scheduling.outlook import Outlook, RankSums, make_outlook

_HYSTERESIS = 0.5
"""A change must gain its own stall once more, and half of it again."""
_LARGEST_PRICE = 1e6
"""Stands for an infinite one in sums."""
_TOO_SLOW = 1.1
_MAX_STRIKES = 2
_LARGE_GROUP = 16
"""From this size on ranks leave by sixteenths of the group: one by one, switches would add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseProfile:
    """What worker time is worth against wall time."""

    price: float
    """Lambda: a second of wall time costs as much as this many seconds of all ranks together. Halving the
    full group then pays while an iteration grows by less than 1 / (1 + 2 lambda)."""
    wall_budget: float | None
    """Share of the wall time without any order that moving may cost; None: no bound."""
    may_move: bool = True


GUARDED = ReleaseProfile(price=3.0, wall_budget=0.03)
EAGER = ReleaseProfile(price=2.0, wall_budget=0.08)
MAX = ReleaseProfile(price=1.0, wall_budget=None)
DRAINED = ReleaseProfile(price=3.0, wall_budget=None, may_move=False)


class CostBasedRelease(ReleasePolicy):
    """One rollout step's decisions by expected cost.

    A pure function of the views and observations shown so far: a replay decides the same.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        num_ranks: int,
        floor: int,
        profile: ReleaseProfile = GUARDED,
        allowed: AllowedSets | None = None,
        kv_tokens: Callable[[int], int | None] = lambda num_members: None,
    ) -> None:
        """`kv_tokens(num_members)`: what a rank's KV pool holds at that group size; None: no bound.

        `allowed` None: any set. The floor holds in any case.
        """
        if not 1 <= floor <= num_ranks or profile.price < 0:
            raise ValueError(
                f"floor={floor}, num_ranks={num_ranks}, price={profile.price}: floor >= 1, price >= 0"
            )
        self._profile = profile
        self._pricing = Pricing(
            clock=clock,
            num_ranks=num_ranks,
            floor=floor,
            price=min(profile.price, _LARGEST_PRICE),
            allowed=allowed or AllowedSets.any(),
            kv_tokens=kv_tokens,
        )
        self._history = _History()
        self._patience: _Patience | None = None
        self._strikes = 0
        self._full_ratio = 1.0

    def decide(self, view: GroupView) -> ReleaseDecision:
        """What to do now. `view.at_s` is on the time base that `clock` prices in. Every view of the step is
        to be shown, at least one each 16 to 32 iterations: from them follows what the step has lost so far.
        Whether an order was carried out is seen from the next view's members."""
        self._history.see(view)
        num_members = len(view.members)
        if not any(view.responses):
            return ReleaseDecision(reason="nothing runs any more")
        if num_members <= self._pricing.floor:
            return ReleaseDecision(reason=f"{num_members} members: the floor")
        if not self._may_move and all(view.responses[rank] for rank in view.members):
            return ReleaseDecision(reason=f"all {num_members} members have work{self._why_no_moves()}")
        if self._patience and self._patience.lasts(view, self._history.num_iterations):
            return self._patience.decision
        return self._weigh(view)

    def observe(self, *, predicted_s: float, observed_s: float) -> None:
        """Iterations at the size of the last view, as the clock prices them and as they were.

        Before the first release it tells what the clock is wrong by altogether, which changes no decision.
        After it, twice in a row a tenth slower than that ends moving in this step. That is for clocks that
        learn nothing. A `CorrectedClock` prices the second iteration better already; there the wall time
        lost, as `view.at_s` tells it, and the corrected prices of staying and of moving end it.
        """
        if predicted_s <= 0 or observed_s <= 0:
            raise ValueError(f"predicted_s={predicted_s}, observed_s={observed_s}: iterations take time")
        ratio = observed_s / predicted_s
        if not self._history.has_shrunk:
            self._full_ratio = ratio
        elif self._strikes < _MAX_STRIKES:
            self._strikes = self._strikes + 1 if ratio > _TOO_SLOW * self._full_ratio else 0

    @property
    def _may_move(self) -> bool:
        profile = self._profile
        return profile.may_move and not math.isinf(profile.price) and self._strikes < _MAX_STRIKES

    def _why_no_moves(self) -> str:
        return (
            "; no more moves: iterations were slower than predicted" if self._strikes == _MAX_STRIKES else ""
        )

    def _weigh(self, view: GroupView) -> ReleaseDecision:
        pricing, outlook = self._pricing, make_outlook(view)
        sums = RankSums.of(outlook, view.num_ranks)
        bounds = Bounds(
            floor=pricing.floor,
            min_change=max(1, view.num_ranks // 16) if view.num_ranks >= _LARGE_GROUP else 1,
            allowed=pricing.allowed,
            may_move=self._may_move,
            kept=self._history.kept,
        )
        weight = _response_weight_tokens(pricing.clock, view, outlook)
        found = candidates(view, outlook, bounds, response_weight_tokens=weight)
        courses = price_courses(
            pricing,
            outlook,
            sums,
            self._history.unmoved(outlook, sums),
            found,
            members=view.members,
            budget=self._budget(view),
        )
        self._history.iteration_s = float(courses.unmoved.iteration_s[0])
        choice = _Choice(view, outlook, courses, pricing.price_ranks)
        decision = choice.decision()
        if decision.is_stay:
            decision = replace(decision, reason=decision.reason + self._why_no_moves())
        self._patience = _Patience.after(
            view, decision, self._history.num_iterations, choice.patience_iterations
        )
        return decision

    def _budget(self, view: GroupView) -> Budget | None:
        if self._profile.wall_budget is None:
            return None
        passed_s = self._history.unmoved_s
        return Budget(share=self._profile.wall_budget, lost_s=view.at_s - passed_s, passed_s=passed_s)


class _History:
    """What a policy keeps of the views it has seen."""

    def __init__(self) -> None:
        self.unmoved_s = 0.0
        """Time so far, had there been no order."""
        self.has_shrunk = False
        self.kept: frozenset[int] = frozenset()
        """Ranks that came back within the step: they stay, so that late work cannot make one come and go."""
        self._home: dict[str, int] = {}
        """Where each response was seen first."""
        self._generated: dict[str, int] = {}
        self.iteration_s = 0.0
        """One iteration of the full group with every response at home, when it was last priced."""
        self.num_iterations = 0
        self._members: frozenset[int] = frozenset()
        self._left: frozenset[int] = frozenset()

    def see(self, view: GroupView) -> None:
        members = frozenset(view.members)
        self.kept |= self._left & members
        self._left |= self._members - members
        generated = {
            response.response_id: response.generated_tokens
            for on_rank in view.responses
            for response in on_rank
        }
        if not generated.keys() <= self._home.keys():
            self._settle(view)
        before = map(self._generated.get, generated, generated.values())
        grown = max(map(sub, generated.values(), before), default=0)
        self.num_iterations += grown
        if self._left:
            self.unmoved_s += grown * self.iteration_s
        else:
            self.unmoved_s = view.at_s
        self.has_shrunk = bool(self._left)
        self._members, self._generated = members, generated

    def unmoved(self, outlook: Outlook, sums: RankSums) -> RankSums:
        homes = np.array([self._home[response.response_id] for response in outlook.responses])
        away = np.flatnonzero(homes != outlook.rank_of)
        return sums.moved(outlook, away.tolist(), homes[away].tolist())

    def _settle(self, view: GroupView) -> None:
        for rank, on_rank in enumerate(view.responses):
            for response in on_rank:
                self._home.setdefault(response.response_id, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patience:
    """A decision to stay holds for a while: until enough has been decoded, has ended, or a rank drained."""

    decision: ReleaseDecision
    ranks: tuple[bool, ...]
    least_responses: int
    until_iteration: float

    @classmethod
    def after(
        cls, view: GroupView, decision: ReleaseDecision, num_iterations: int, patience_iterations: float
    ) -> "_Patience":
        num_responses = sum(len(on_rank) for on_rank in view.responses)
        return cls(
            decision=decision,
            ranks=_work(view),
            least_responses=num_responses - max(1, num_responses // 32) + 1,
            until_iteration=num_iterations + patience_iterations if decision.is_stay else 0.0,
        )

    def lasts(self, view: GroupView, num_iterations: int) -> bool:
        is_same = self.ranks == _work(view) and num_iterations < self.until_iteration
        return is_same and sum(len(on_rank) for on_rank in view.responses) >= self.least_responses


def _work(view: GroupView) -> tuple[bool, ...]:
    return tuple(bool(view.responses[rank]) for rank in view.members)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Between an option now, an option later, and none."""

    view: GroupView
    outlook: Outlook
    courses: Courses
    price_ranks: float

    @property
    def patience_iterations(self) -> float:
        """A quarter of what is to be waited for, at most a 128th of the longest possible rest."""
        best = self.outlook.num_cells - 1
        if self.courses.options:
            costs = self.courses.later_costs(self.courses.stay, self.outlook, self.price_ranks)
            best = int(np.argmin(np.min(costs, axis=0)))
        return min(0.25 * float(self.outlook.starts[best]), self.outlook.longest_rest_tokens / 128)

    def decision(self) -> ReleaseDecision:
        stay = self.courses.stay
        begin = f"{len(self.view.members)} members, {len(self.outlook.responses)} responses"
        options = [option for option in self.courses.options if option.may[0]]
        if not options:
            return ReleaseDecision(
                reason=f"{begin}: {self._why_none()}", predicted_remaining_s=self._rest_s()
            )
        best = min(options, key=self._now)
        now, later, (stall_s, *_) = self._now(best), self._later(stay), best.stall_s
        gain = stay.total - now
        size = len(best.candidate.survivors)
        what = f"{size} members with {len(best.candidate.movers)} moves"
        if gain <= _HYSTERESIS * self._weight(stall_s) or gain <= 0:
            reason = (
                f"{begin}: {what} would gain {gain:.4g} s, its stall weighs {self._weight(stall_s):.4g} s"
            )
            return ReleaseDecision(reason=reason, predicted_remaining_s=self._rest_s())
        if later < now:
            reason = f"{begin}: {what} gains {gain:.4g} s now, {stay.total - later:.4g} s a little later"
            return ReleaseDecision(reason=reason, predicted_remaining_s=self._rest_s())
        return self._order(best, gain, f"{begin}: to {what}, gain {gain:.4g} s, stall {stall_s:.4g} s")

    def _now(self, option: Option) -> float:
        """The best that can come of carrying it out now: with another one later, if that is better."""
        after = min(option.course.total, self._later(option.course, below=len(option.candidate.survivors)))
        return self._weight(float(option.stall_s[0])) + after

    def _later(self, before: Course, below: int | None = None) -> float:
        sizes = [len(option.candidate.survivors) for option in self.courses.options]
        # Larger groups come first.
        first = 0 if below is None else sum(size >= below for size in sizes)
        costs = self.courses.later_costs(before, self.outlook, self.price_ranks)
        return float(np.min(costs[first:, 1:], initial=math.inf))

    def _weight(self, stall_s: float) -> float:
        return stall_s * (len(self.view.members) + self.price_ranks)

    def _rest_s(self, option: Option | None = None) -> float:
        course = self.courses.stay if option is None else option.course
        return float((course.span_s * self.outlook.runs_on).sum())

    def _why_none(self) -> str:
        options = self.courses.options
        if not options:
            return "no smaller group can be made"
        if not any(option.is_within_pool[0] for option in options):
            return "the context does not fit the KV pools of a smaller group"
        return "moving would cost more wall time than the budget has left"

    def _order(self, option: Option, gain: float, reason: str) -> ReleaseDecision:
        one, outlook = option.candidate, self.outlook
        sources = outlook.rank_of[list(one.movers)].tolist()
        moves = tuple(
            Move(response_id=outlook.responses[mover].response_id, source=source, target=target)
            for mover, source, target in zip(one.movers, sources, one.targets, strict=True)
        )
        stall_s = float(option.stall_s[0])
        return ReleaseDecision(
            leavers=one.leavers,
            moves=moves,
            reason=f"{reason}; {self._rest_s(option):.4g} s left",
            predicted_gain_s=gain,
            predicted_stall_s=stall_s,
            predicted_remaining_s=stall_s + self._rest_s(option),
        )


def _response_weight_tokens(clock: Clock, view: GroupView, outlook: Outlook) -> float:
    """Context tokens on the fullest rank that take as long as one more response there, growth included."""
    counts = np.bincount(outlook.rank_of, outlook.contexts > 0, minlength=view.num_ranks)
    tokens = np.bincount(outlook.rank_of, outlook.contexts, minlength=view.num_ranks)
    base = np.array([len(view.members), counts.sum(), counts.max(), tokens.max()])
    # The same load, then with a response more on the fullest rank, then with a thousand tokens more there.
    ranks, running, most, context = (base + np.array([[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1000]])).T
    loads = Loads(num_ranks=ranks, num_running=running, max_running=most, max_context_tokens=context)
    base_s, response_s, tokens_s = decode_many_s(clock, loads)
    growth = 0.5 * float(outlook.rest_tokens.max())
    if tokens_s <= base_s:
        return growth
    return growth + 1000 * max(0.0, float(response_s - base_s)) / float(tokens_s - base_s)
