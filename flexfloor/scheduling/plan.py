"""The plan of a rollout step: how many ranks it starts with, which response goes where, in which order. PURE.

Lengths are sampled from the predictions, so a plan holds in expectation; what really comes is the business of
the release policy and of the engine's retraction.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flexfloor.config.choices import Placement, StartingSize
from flexfloor.scheduling.cost import Clock
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.place import LeastInflight, PlacementPolicy, Planned, RoundRobin, chunks
from flexfloor.scheduling.planner import PlacedStep, Planner

_BASELINES = (Placement.round_robin, Placement.least_inflight)
_NEED_PREDICTIONS = (Placement.balanced, Placement.tiers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedResponse:
    """A response to place."""

    response_id: str
    prompt_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What a step does before anything has been seen of it."""

    order: tuple[str, ...]
    """Response ids in the order of submission, which is that of every rank's queue."""
    rank_of: Mapping[str, int] | None
    """dp_rank by response_id; None: the policy decides as places become free."""
    members: tuple[int, ...]
    """Ranks that serve from the start, ascending."""
    placement: str
    """The one that was taken, which may not be the one asked for."""
    reason: str
    """In words with the numbers."""
    predicted_peak_kv_tokens: tuple[int, ...]
    """By dp_rank, highest of the sampled scenarios, 0 for a rank outside; empty without predictions."""
    kv_capacity_tokens: int | None
    """Of one rank while `members` serve; None: not known, and no bound."""

    def policy(self, *, num_ranks: int, running_limit_per_rank: int | None) -> PlacementPolicy:
        """A fresh placement policy that carries out this plan; feed it the responses in `order`."""
        policy: RoundRobin | LeastInflight | Planned
        if self.placement == Placement.round_robin:
            policy = RoundRobin(num_ranks)
        elif self.rank_of is None:
            policy = LeastInflight(num_ranks, running_limit_per_rank)
        else:
            policy = Planned(self.rank_of, num_ranks)
        policy.set_members(self.members)
        return policy


def plan_step(
    requests: Sequence[PlannedResponse],
    predictions: Mapping[str, LengthPrediction],
    *,
    num_ranks: int,
    placement: Placement,
    clock: Clock,
    kv_tokens: Callable[[int], int | None],
    running_limit_per_rank: int | None,
    price: float,
    wall_budget: float,
    floor: int,
    allowed_sizes: Sequence[int] | None,
    starting_size: StartingSize,
    seed: int,
) -> StepPlan:
    """Plan one rollout step; `requests` in arrival order, `predictions` by prompt_id.

    Sizes, and tiers against balanced, are compared by J = occupied + price * num_ranks * wall, among those
    whose wall is at most (1 + `wall_budget`) times that of the full group; the clock's unit is that of J.
    `kv_tokens(num_members)` is the KV pool of one rank in a group of that size, None: no bound.
    `allowed_sizes`: sizes that a group may have, None: any. `floor`: fewest ranks that may serve.

    Where the predicted peak KV of a rank exceeds its pool, a better balanced placement is tried, then more
    ranks; where nothing fits, the plan is round robin over all ranks, and says so. `round_robin` and
    `least_inflight` are baselines: they keep arrival order, and at full size an excess is told, not changed.
    They and `chunked` do without predictions and then start at full size; the others raise ValueError for a
    prompt that has none.
    """
    _check(requests, num_ranks, floor, price, wall_budget, allowed_sizes)
    missing = sorted({request.prompt_id for request in requests} - set(predictions))
    if missing and placement in _NEED_PREDICTIONS:
        raise ValueError(f"placement={placement}: prompt {missing[0]} has no length prediction")
    if missing or not requests:
        return _unpredicted(requests, placement, num_ranks, kv_tokens)
    planner = Planner(
        predictions=[predictions[request.prompt_id] for request in requests],
        prompt_tokens=[request.prompt_tokens for request in requests],
        num_ranks=num_ranks,
        clock=clock,
        kv_tokens=kv_tokens,
        running_limit=running_limit_per_rank,
        price=price,
        wall_budget=wall_budget,
        floor=floor,
        allowed_sizes=allowed_sizes,
        seed=seed,
    )
    chosen, reason = planner.choose(
        placement, is_baseline=placement in _BASELINES, may_start_smaller=starting_size is StartingSize.auto
    )
    return _as_plan(requests, chosen, reason, num_ranks, kv_tokens)


def _check(
    requests: Sequence[PlannedResponse],
    num_ranks: int,
    floor: int,
    price: float,
    wall_budget: float,
    allowed_sizes: Sequence[int] | None,
) -> None:
    if not 1 <= floor <= num_ranks:
        raise ValueError(f"floor={floor}: a group has 1 to {num_ranks} ranks")
    if not (price >= 0 and wall_budget >= 0):
        raise ValueError(f"price={price}, wall_budget={wall_budget}: neither may be negative")
    if allowed_sizes is not None and not all(1 <= size <= num_ranks for size in allowed_sizes):
        raise ValueError(f"allowed_sizes={list(allowed_sizes)}: a group has 1 to {num_ranks} ranks")
    names = {request.response_id for request in requests}
    if len(names) != len(requests):
        raise ValueError(f"{len(requests)} responses, but only {len(names)} different response_ids")


def _unpredicted(
    requests: Sequence[PlannedResponse],
    placement: Placement,
    num_ranks: int,
    kv_tokens: Callable[[int], int | None],
) -> StepPlan:
    """Arrival order over all ranks."""
    names = [request.response_id for request in requests]
    if placement is Placement.least_inflight:
        rank_of = None
    elif placement is Placement.round_robin:
        rank_of = {name: index % num_ranks for index, name in enumerate(names)}
    else:
        rank_of = dict(zip(names, chunks(len(names), num_ranks), strict=True))
    return StepPlan(
        order=tuple(names),
        rank_of=rank_of,
        members=tuple(range(num_ranks)),
        placement=str(placement),
        reason=f"{placement} over all {num_ranks} ranks; nothing is predicted"
        if names
        else "no responses to place",
        predicted_peak_kv_tokens=(),
        kv_capacity_tokens=kv_tokens(num_ranks),
    )


def _as_plan(
    requests: Sequence[PlannedResponse],
    chosen: PlacedStep,
    reason: str,
    num_ranks: int,
    kv_tokens: Callable[[int], int | None],
) -> StepPlan:
    names = [requests[at].response_id for at in chosen.order.tolist()]
    ranks = chosen.ranks.tolist()
    peaks = [*chosen.peak_kv_tokens.tolist(), *[0] * (num_ranks - chosen.size)]
    is_dynamic = chosen.placement is Placement.least_inflight
    return StepPlan(
        order=tuple(names),
        rank_of=None if is_dynamic else dict(zip(names, ranks, strict=True)),
        members=tuple(range(chosen.size)),
        placement=str(chosen.placement),
        reason=reason,
        predicted_peak_kv_tokens=tuple(peaks),
        kv_capacity_tokens=kv_tokens(chosen.size),
    )
