"""The cost-based release over whole courses of steps: what holds for any, and what pinned ones gave."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.scheduling.clocks import GpuClock
from flexfloor.scheduling.decision import GroupView, ReleaseDecision, RunningResponse
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.release import DRAINED, EAGER, GUARDED, MAX, CostBasedRelease, ReleaseProfile

CAP = 16_384
PREDICTIONS = st.builds(
    LengthPrediction,
    mean_log=st.floats(3.0, 9.0),
    sd_log=st.floats(0.0, 1.2),
    cap_share=st.sampled_from([0.0, 0.02, 1.0]),
    cap_tokens=st.just(CAP),
)
RESPONSES = st.tuples(PREDICTIONS, st.integers(10, CAP))
STEPS = st.lists(st.lists(RESPONSES, max_size=5), min_size=2, max_size=6)
PROFILES = st.sampled_from(
    [
        DRAINED,
        GUARDED,
        EAGER,
        MAX,
        ReleaseProfile(price=math.inf, wall_budget=None),
        ReleaseProfile(price=0, wall_budget=None),
    ]
)


class _Course:
    """Runs a step under a policy, a thousand iterations at a time, and checks every order."""

    def __init__(self, ranks: list[list[tuple[LengthPrediction, int]]], floor: int, pool: int) -> None:
        self.num_ranks, self.floor, self.pool = len(ranks), floor, pool
        self.members = list(range(len(ranks)))
        self.rank_of = {f"{rank}/{i}": rank for rank, each in enumerate(ranks) for i in range(len(each))}
        self.spec = {f"{rank}/{i}": one for rank, each in enumerate(ranks) for i, one in enumerate(each)}

    def run(self, policy: CostBasedRelease) -> list[ReleaseDecision]:
        decisions = []
        for age in range(10, CAP, 1000):
            decision = policy.decide(self._view(age))
            self._carry_out(decision, age)
            decisions.append(decision)
        return decisions

    def _view(self, age: int) -> GroupView:
        self.rank_of = {name: rank for name, rank in self.rank_of.items() if self.spec[name][1] > age}
        by_rank: list[list[RunningResponse]] = [[] for _ in range(self.num_ranks)]
        for name, rank in self.rank_of.items():
            by_rank[rank].append(
                RunningResponse(
                    response_id=name, prompt_tokens=50, generated_tokens=age, prediction=self.spec[name][0]
                )
            )
        return GroupView(
            at_s=age * 0.01,
            num_ranks=self.num_ranks,
            members=tuple(self.members),
            responses=tuple(tuple(each) for each in by_rank),
        )

    def _carry_out(self, decision: ReleaseDecision, age: int) -> None:
        assert decision.reason
        leavers = set(decision.leavers)
        assert leavers <= set(self.members)
        stay = [rank for rank in self.members if rank not in leavers]
        if leavers:
            assert len(stay) >= self.floor
        assert sorted(move.response_id for move in decision.moves) == sorted(
            name for name, rank in self.rank_of.items() if rank in leavers
        )
        for move in decision.moves:
            assert self.rank_of[move.response_id] == move.source
            assert move.target in stay
            self.rank_of[move.response_id] = move.target
        if decision.moves:
            held = [sum(50 + age for rank in self.rank_of.values() if rank == member) for member in stay]
            assert max(held) <= self.pool
        self.members = stay


@given(ranks=STEPS, floor=st.integers(1, 6), profile=PROFILES, pool=st.sampled_from([17_000, 40_000, 10**6]))
@settings(max_examples=60, deadline=None)
def test_any_course_keeps_floor_pools_and_every_response(
    ranks: list[list[tuple[LengthPrediction, int]]], floor: int, profile: ReleaseProfile, pool: int
) -> None:
    floor = min(floor, len(ranks))

    def run() -> list[ReleaseDecision]:
        policy = CostBasedRelease(
            clock=GpuClock(),
            num_ranks=len(ranks),
            floor=floor,
            profile=profile,
            kv_tokens=lambda size: pool,
        )
        return _Course(ranks, floor, pool).run(policy)

    decisions = run()
    assert decisions == run()
    if not profile.may_move or math.isinf(profile.price):
        assert not any(decision.moves for decision in decisions)
    left = [rank for decision in decisions for rank in decision.leavers]
    assert len(left) == len(set(left))


def _ranks(seed: int) -> list[list[tuple[LengthPrediction, int]]]:
    """8 ranks with 6 responses each of 12 prompts, whose samples share a prediction."""
    rng = np.random.default_rng(seed)
    prompts = [
        LengthPrediction(mean_log=mean, sd_log=0.7, cap_share=0.02, cap_tokens=CAP)
        for mean in rng.uniform(6.5, 8.5, 12).tolist()
    ]
    lengths = [
        [min(CAP, round(math.exp(one.mean_log + 0.7 * float(rng.standard_normal())))) for _ in range(4)]
        for one in prompts
    ]
    each = [(one, length) for one, drawn in zip(prompts, lengths, strict=True) for length in drawn]
    return [each[rank::8] for rank in range(8)]


def _orders(
    ranks: list[list[tuple[LengthPrediction, int]]], profile: ReleaseProfile
) -> list[ReleaseDecision]:
    return _Course(ranks, 2, 10**6).run(
        CostBasedRelease(clock=GpuClock(), num_ranks=8, floor=2, profile=profile)
    )


PINNED = {
    (0, GUARDED): [((5, 6, 7), 18, 45.988), ((0, 1), 2, 13.292), ((2,), 0, 35.989)],
    (1, GUARDED): [((5, 6, 7), 18, 48.515), ((4,), 3, 8.606), ((1, 3), 0, 138.168)],
    (0, MAX): [((3, 4, 5, 6, 7), 30, 216.506), ((0,), 4, 6.490)],
    (1, MAX): [((3, 4, 5, 6, 7), 30, 203.754), ((1,), 2, 10.899)],
}
"""Leavers, moves and gain by an implementation that prices every response and every option by itself."""


@pytest.mark.parametrize(("seed", "profile"), PINNED, ids=["0 guarded", "1 guarded", "0 max", "1 max"])
def test_pricing_all_at_once_decides_as_pricing_one_by_one(seed: int, profile: ReleaseProfile) -> None:
    orders = [order for order in _orders(_ranks(seed), profile) if order.leavers]
    expected = PINNED[seed, profile]
    assert [(order.leavers, len(order.moves)) for order in orders] == [each[:2] for each in expected]
    gains = [order.predicted_gain_s for order in orders]
    assert gains == pytest.approx([each[2] for each in expected], abs=1e-3)


@pytest.mark.parametrize("profile", [GUARDED, MAX])
def test_responses_that_share_a_prediction_decide_as_if_each_had_its_own(profile: ReleaseProfile) -> None:
    shared = _ranks(3)
    own = [[(replace(prediction), length) for prediction, length in rank] for rank in shared]
    one, other = _orders(shared, profile), _orders(own, profile)
    assert [(each.leavers, each.moves) for each in one] == [(each.leavers, each.moves) for each in other]
    gains = [each.predicted_gain_s for each in one]
    assert gains == pytest.approx([each.predicted_gain_s for each in other])
    assert any(gains)
