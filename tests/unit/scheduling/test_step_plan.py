"""Plans of a rollout step, by values and by property."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.config.choices import Placement, StartingSize
from flexfloor.scheduling.cost import GroupLoad
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.place import LeastInflight, Planned, RoundRobin
from flexfloor.scheduling.plan import PlannedResponse, StepPlan, plan_step
from flexfloor.scheduling.planner import shrinking_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearClock:
    per_running_s: float = 0.0
    per_context_token_s: float = 0.0
    name: str = "linear"

    def decode_s(self, load: GroupLoad) -> float:
        loaded = self.per_running_s * load.max_running
        return 1.0 + loaded + self.per_context_token_s * load.max_context_tokens

    def prefill_s(self, max_new_tokens: int) -> float:
        return 0.0

    def switch_s(self, num_ranks_before: int, num_ranks_after: int) -> float:
        return 0.0


def predict(num_tokens: float, sd_log: float = 0.0, cap_share: float = 0.0) -> LengthPrediction:
    return LengthPrediction(
        mean_log=math.log(num_tokens), sd_log=sd_log, cap_share=cap_share, cap_tokens=100_000
    )


def requests(prompts: list[int], siblings: int = 1) -> list[PlannedResponse]:
    """Response `p2/0` is of prompt `p2` with `prompts[2]` tokens."""
    return [
        PlannedResponse(response_id=f"p{index}/{sibling}", prompt_id=f"p{index}", prompt_tokens=tokens)
        for index, tokens in enumerate(prompts)
        for sibling in range(siblings)
    ]


def plan(
    lengths: list[int],
    placement: Placement,
    *,
    prompts: list[int] | None = None,
    siblings: int = 1,
    **changes: Any,
) -> StepPlan:
    arguments: dict[str, Any] = {
        "num_ranks": 2,
        "clock": LinearClock(),
        "kv_tokens": lambda num_members: None,
        "running_limit_per_rank": None,
        "price": 3.0,
        "wall_budget": 0.03,
        "floor": 1,
        "allowed_sizes": None,
        "starting_size": StartingSize.full,
        "seed": 5,
    }
    predictions = {f"p{index}": predict(length) for index, length in enumerate(lengths)}
    asked = requests(prompts or [0] * len(lengths), siblings)
    return plan_step(asked, predictions, placement=placement, **{**arguments, **changes})


def ranks(planned: StepPlan) -> list[int]:
    """By prompt, of the first sibling."""
    assert planned.rank_of is not None
    return [planned.rank_of[f"p{index}/0"] for index in range(len(planned.rank_of))]


def test_balanced_is_a_serpentine_and_longest_first() -> None:
    planned = plan([100, 400, 200, 300], Placement.balanced)
    assert planned.order == ("p1/0", "p3/0", "p2/0", "p0/0")
    assert ranks(planned) == [0, 0, 1, 1]
    # Rank 0 holds 100 twice, then 400 alone; rank 1 200 twice, then 300 alone.
    assert planned.predicted_peak_kv_tokens == (400, 400)
    assert (planned.placement, planned.members) == ("balanced", (0, 1))
    assert planned.reason == "balanced over 2 of 2 ranks, peak KV 400 tokens"


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (Placement.round_robin, [0, 1, 0, 1, 0]),
        (Placement.chunked, [0, 0, 0, 1, 1]),
        (Placement.least_inflight, None),
    ],
)
@pytest.mark.parametrize("is_predicted", [True, False])
def test_the_others_keep_arrival_order_with_or_without_predictions(
    placement: Placement, expected: list[int] | None, is_predicted: bool
) -> None:
    lengths = [10, 50, 40, 20, 30]
    if is_predicted:
        planned = plan(lengths, placement)
        assert max(planned.predicted_peak_kv_tokens) > 0
    else:
        planned = plan_without_predictions(placement)
        assert planned.predicted_peak_kv_tokens == ()
        assert planned.reason == f"{placement} over all 2 ranks; nothing is predicted"
    assert planned.order == tuple(f"p{index}/0" for index in range(5))
    assert (planned.rank_of if expected is None else ranks(planned)) == expected


def plan_without_predictions(placement: Placement) -> StepPlan:
    return plan_step(
        requests([0] * 5),
        {"p0": predict(3)},
        num_ranks=2,
        placement=placement,
        clock=LinearClock(),
        kv_tokens=lambda num_members: 7,
        running_limit_per_rank=None,
        price=3.0,
        wall_budget=0.03,
        floor=1,
        allowed_sizes=None,
        starting_size=StartingSize.auto,
        seed=0,
    )


@pytest.mark.parametrize("placement", [Placement.balanced, Placement.tiers])
def test_a_placement_by_length_needs_every_prediction(placement: Placement) -> None:
    with pytest.raises(ValueError, match=f"placement={placement}: prompt p1 has no length prediction"):
        plan_without_predictions(placement)


def test_a_step_without_responses_has_an_empty_plan() -> None:
    planned = plan([], Placement.balanced)
    assert (planned.order, planned.members, planned.reason) == ((), (0, 1), "no responses to place")


def test_short_kv_is_met_by_a_better_balanced_placement() -> None:
    # Serpentine puts both long prompts on rank 1: 2 x (500 + 300) tokens when the shorter one ends.
    lengths, prompts = [600, 500, 300, 100], [0, 500, 500, 0]
    assert ranks(plan(lengths, Placement.balanced, prompts=prompts)) == [0, 1, 1, 0]
    planned = plan(lengths, Placement.balanced, prompts=prompts, kv_tokens=lambda num_members: 1599)
    assert ranks(planned) == [1, 0, 1, 0]
    assert planned.predicted_peak_kv_tokens == (1000, 1100)
    assert planned.reason == (
        "balanced over 2 of 2 ranks, peak KV 1100 of 1599 tokens; levelled by tokens, as balanced at size 2 "
        "would need peak KV 1600 of 1599 tokens"
    )


def test_chunks_that_overfill_a_rank_are_balanced_instead() -> None:
    planned = plan([400, 400, 10, 10], Placement.chunked, kv_tokens=lambda num_members: 500)
    assert planned.placement == "balanced"
    assert "as chunked at size 2 would need peak KV 800 of 500 tokens" in planned.reason


def test_short_kv_keeps_more_ranks_in_the_group() -> None:
    pools = {4: 1000, 3: 900, 2: 799, 1: 100}
    auto: dict[str, Any] = {"num_ranks": 4, "starting_size": StartingSize.auto}
    free = plan([400] * 4, Placement.balanced, **auto)
    assert free.members == (0,)
    planned = plan([400] * 4, Placement.balanced, kv_tokens=lambda size: pools[size], **auto)
    assert planned.members == (0, 1, 2)
    assert planned.kv_capacity_tokens == 900
    assert planned.predicted_peak_kv_tokens == (400, 400, 800, 0)
    assert "at size 2 would need peak KV 800 of 799 tokens" in planned.reason


def test_where_nothing_fits_the_plan_is_the_baseline_and_says_so() -> None:
    planned = plan([400, 100, 300], Placement.tiers, kv_tokens=lambda num_members: 399)
    assert (planned.placement, planned.members) == ("round_robin", (0, 1))
    assert planned.order == ("p0/0", "p1/0", "p2/0")
    assert ranks(planned) == [0, 1, 0]
    assert planned.predicted_peak_kv_tokens == (600, 100)
    assert "peak KV 600 of 399 tokens: no plan fits (balanced at size 2 would need" in planned.reason


@pytest.mark.parametrize("placement", [Placement.round_robin, Placement.least_inflight])
def test_a_baseline_is_told_of_short_kv_and_not_changed(placement: Placement) -> None:
    planned = plan([400, 10, 400, 10], placement, kv_tokens=lambda num_members: 500)
    assert planned.placement == placement
    assert planned.predicted_peak_kv_tokens == (800, 20)
    assert planned.reason.endswith("a baseline keeps its placement although KV is predicted to run short")


def test_auto_starts_with_the_ranks_that_the_price_pays_for() -> None:
    # Alike responses, one per rank: T = 1 + c x responses on a rank, so half the ranks take 1 + 2c.
    def start(per_running_s: float, price: float, wall_budget: float) -> StepPlan:
        return plan(
            [100] * 8,
            Placement.balanced,
            num_ranks=8,
            allowed_sizes=[4, 2],
            floor=2,
            clock=LinearClock(per_running_s=per_running_s),
            starting_size=StartingSize.auto,
            price=price,
            wall_budget=wall_budget,
        )

    assert len(start(0.0, 3.0, 0.03).members) == 2
    # 4 ranks: J = (4 + 3 x 8) x 1.02 < (8 + 3 x 8) x 1.01; 2 ranks: 26 x 1.04, still less.
    assert len(start(0.01, 3.0, 0.05).members) == 2
    guarded = start(0.01, 3.0, 0.01)
    assert len(guarded.members) == 4
    assert "occupied time -49.5% and wall time +1.0% against all ranks" in guarded.reason
    assert "size 2 would take +3.0% wall time, the guard allows +1%" in guarded.reason
    # With c = 1 the price forbids what the guard allows: (8 + 24) x 2 < (4 + 24) x 3 < (2 + 24) x 5.
    assert len(start(1.0, 3.0, math.inf).members) == 8
    # (4 + 1.6) x 3 < (2 + 1.6) x 5 < (8 + 1.6) x 2
    assert len(start(1.0, 0.2, math.inf).members) == 4
    assert len(start(1.0, 0.0, math.inf).members) == 2
    assert len(start(0.01, math.inf, math.inf).members) == 8


def test_tiers_keep_long_responses_together_where_the_clock_lets_them() -> None:
    lengths = [1000, 1000, 1000, 1000, *[100] * 12]
    free = plan(lengths, Placement.tiers, num_ranks=4, price=0.3, wall_budget=0.1)
    assert free.placement == "tiers"
    assert set(ranks(free)[:4]) == {0}
    assert "predicted occupied time -67.5% and wall time +0.0% against balanced" in free.reason
    # Where context costs time, together is slower than the guard allows.
    clock = LinearClock(per_context_token_s=1e-3)
    guarded = plan(lengths, Placement.tiers, num_ranks=4, price=0.3, wall_budget=0.1, clock=clock)
    assert guarded.placement == "balanced"
    assert set(ranks(guarded)[:4]) == {0, 1, 2, 3}
    assert (
        "no tiers: none lowers the cost within 110% of the wall time and 85% of the KV pool" in guarded.reason
    )
    # And where one rank's pool cannot hold them: 4 x 1000 > 0.85 x 4500.
    small = plan(
        lengths, Placement.tiers, num_ranks=4, price=0.3, wall_budget=0.1, kv_tokens=lambda num_members: 4500
    )
    assert max(small.predicted_peak_kv_tokens) <= 0.85 * 4500


def test_tiers_need_a_group_that_can_shrink() -> None:
    planned = plan([1000, 10], Placement.tiers, floor=2)
    assert planned.placement == "balanced"
    assert "no tiers: the group cannot shrink any further" in planned.reason


def test_the_policy_carries_out_the_plan() -> None:
    for placement, kind in (
        (Placement.round_robin, RoundRobin),
        (Placement.least_inflight, LeastInflight),
        (Placement.chunked, Planned),
        (Placement.balanced, Planned),
    ):
        planned = plan([40, 10, 30, 20, 50], placement, num_ranks=3)
        policy = planned.policy(num_ranks=3, running_limit_per_rank=None)
        assert isinstance(policy, kind)
        placed = {name: policy.submit(name) for name in planned.order}
        if planned.rank_of is not None:
            assert placed == planned.rank_of


def test_the_policy_of_a_small_start_stays_within_its_members() -> None:
    auto: dict[str, Any] = {"num_ranks": 4, "starting_size": StartingSize.auto, "floor": 2}
    for placement in (Placement.round_robin, Placement.least_inflight, Placement.balanced):
        planned = plan([400] * 6, placement, **auto)
        assert planned.members == (0, 1)
        policy = planned.policy(num_ranks=4, running_limit_per_rank=3)
        for name in planned.order:
            policy.submit(name)
        assert policy.inflight == (3, 3, 0, 0)


def test_sizes_shrink_by_quarters_on_large_groups() -> None:
    assert shrinking_sizes(4, 2, None) == (4, 3, 2)
    assert shrinking_sizes(64, 7, None) == (64, 48, 32, 24, 16, 12, 8, 7)
    assert shrinking_sizes(8, 3, [2, 4, 5]) == (8, 5, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"floor": 0}, "floor=0: a group has 1 to 2 ranks"),
        ({"floor": 3}, "floor=3"),
        ({"price": -1.0}, "price=-1.0"),
        ({"wall_budget": math.nan}, "wall_budget=nan"),
        ({"allowed_sizes": [3]}, r"allowed_sizes=\[3\]"),
    ],
)
def test_impossible_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan([5, 6], Placement.balanced, **changes)


def test_twins_are_refused() -> None:
    twin = requests([0])[0]
    with pytest.raises(ValueError, match="2 responses, but only 1 different response_ids"):
        plan_step(
            [twin, twin],
            {"p0": predict(3)},
            num_ranks=2,
            placement=Placement.round_robin,
            clock=LinearClock(),
            kv_tokens=lambda num_members: None,
            running_limit_per_rank=None,
            price=3.0,
            wall_budget=0.03,
            floor=1,
            allowed_sizes=None,
            starting_size=StartingSize.full,
            seed=0,
        )


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    num_ranks = draw(st.integers(1, 10))
    kv = draw(st.none() | st.integers(50, 3000))
    return {
        "num_ranks": num_ranks,
        "floor": draw(st.integers(1, num_ranks)),
        "placement": draw(st.sampled_from(list(Placement))),
        "starting_size": draw(st.sampled_from(list(StartingSize))),
        "allowed_sizes": draw(st.none() | st.lists(st.integers(1, num_ranks), max_size=3)),
        "kv_tokens": lambda size: None if kv is None else kv * (10 + size) // 10,
        "running_limit_per_rank": draw(st.none() | st.integers(1, 4)),
        "price": draw(st.sampled_from([0.0, 0.3, 3.0, math.inf])),
        "wall_budget": draw(st.sampled_from([0.0, 0.03, 0.5, math.inf])),
        "clock": LinearClock(per_running_s=draw(st.sampled_from([0.0, 0.1])), per_context_token_s=1e-4),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=80, deadline=None)
@given(
    case=cases(),
    predicted=st.lists(
        st.builds(predict, st.integers(1, 400), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.01])),
        max_size=12,
    ),
    siblings=st.integers(1, 3),
)
def test_a_plan_places_each_once_on_its_members_within_the_kv_pools(
    case: dict[str, Any], predicted: list[LengthPrediction], siblings: int
) -> None:
    asked = requests([(7 * index) % 60 for index in range(len(predicted))], siblings)
    predictions = {f"p{index}": prediction for index, prediction in enumerate(predicted)}
    planned = plan_step(asked, predictions, **case)
    assert planned == plan_step(asked, predictions, **case)

    names = [request.response_id for request in asked]
    assert sorted(planned.order) == sorted(names)
    size = len(planned.members)
    assert planned.members == tuple(range(size))
    allowed = case["allowed_sizes"]
    assert size == case["num_ranks"] or (
        case["starting_size"] is StartingSize.auto
        and size >= case["floor"]
        and (allowed is None or size in allowed)
    )
    if planned.rank_of is not None:
        assert set(planned.rank_of) == set(names)
        assert set(planned.rank_of.values()) <= set(planned.members)

    capacity, peaks = planned.kv_capacity_tokens, planned.predicted_peak_kv_tokens
    assert capacity == case["kv_tokens"](size)
    assert not names or len(peaks) == case["num_ranks"]
    if capacity is not None and max(peaks, default=0) > capacity:
        assert planned.placement in ("round_robin", "least_inflight")
        assert size == case["num_ranks"]
        assert "no plan fits" in planned.reason or "a baseline keeps its placement" in planned.reason

    if planned.placement in ("balanced", "tiers"):
        expected = [predictions[name.split("/")[0]].expected_tokens for name in planned.order]
        assert expected == sorted(expected, reverse=True), "so each rank's queue is longest first"
    elif planned.placement in ("round_robin", "least_inflight"):
        assert planned.order == tuple(names)
    if planned.placement in ("balanced", "round_robin", "chunked") and planned.rank_of:
        placed = list(planned.rank_of.values())
        counts = [placed.count(rank) for rank in planned.members]
        assert max(counts) - min(counts) <= 1
