"""The simulated engine: hand-counted steps, an iteration-by-iteration reference, KV pressure, moves."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.scheduling.cost import GroupLoad
from flexfloor.scheduling.decision import GroupView, Move, ReleaseDecision
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.place import LeastInflight, RoundRobin
from flexfloor.simulate.engine import Limits, SimulatedResponse, StepOutcome, simulate_step

PREDICTION = LengthPrediction(mean_log=3.0, sd_log=0.5, cap_share=0.0, cap_tokens=1000)


class CountingClock:
    """A second an iteration, half a second more where somebody prefills, ten a switch."""

    name = "counting"

    def decode_s(self, load: GroupLoad) -> float:
        return 1.0

    def prefill_s(self, max_new_tokens: int) -> float:
        return 0.5

    def switch_s(self, num_ranks_before: int, num_ranks_after: int) -> float:
        return 10.0


def response(index: int, num_tokens: int, arrival: int = 0, prompt_tokens: int = 10) -> SimulatedResponse:
    return SimulatedResponse(
        response_id=f"r{index}",
        prompt_tokens=prompt_tokens,
        num_tokens=num_tokens,
        max_new_tokens=1000,
        prediction=PREDICTION,
        arrival_iteration=arrival,
    )


def run(lengths: Sequence[int], num_ranks: int, **limits: int) -> StepOutcome:
    responses = [response(index, length) for index, length in enumerate(lengths)]
    return simulate_step(responses, RoundRobin(num_ranks), members=range(num_ranks), limits=Limits(**limits))


def test_two_ranks_by_hand() -> None:
    outcome = run([3, 1, 5], num_ranks=2)
    rows = outcome.iterations
    # Rank 0 holds 3 and 5 tokens, rank 1 the one of 1 token, which its prefill already gives.
    assert outcome.finished_at == (3, 1, 5)
    assert outcome.finished_on == (0, 1, 0)
    assert rows.repeats.tolist() == [1, 2, 2]
    assert rows.prefill_tokens.tolist() == [[20, 10], [0, 0], [0, 0]]
    assert rows.num_running.tolist() == [[0, 0], [2, 0], [1, 0]]
    # First iteration of the row 2 x 11, two tokens more in the next; the middle is rounded down.
    assert rows.context_tokens.tolist() == [[0, 0], [23, 0], [13, 0]]
    assert (rows.num_iterations, rows.worker_iterations, rows.idle_worker_iterations) == (5, 10, 4)


def test_a_rank_that_prefills_does_not_decode() -> None:
    responses = [response(0, 6), response(1, 2, arrival=3)]
    outcome = simulate_step(responses, RoundRobin(1), members=[0], limits=Limits())
    # 1 prefill, 2 decode, 1 prefill of the second (the first gets nothing), then both decode.
    assert outcome.iterations.num_running.sum(axis=1).tolist() == [0, 1, 0, 2, 1]
    assert outcome.finished_at == (7, 5)


def test_the_running_limit_lets_the_next_one_in_when_a_response_ends() -> None:
    outcome = run([3, 4, 2], num_ranks=1, running_limit_per_rank=1)
    assert outcome.finished_at == (3, 7, 9)


def test_the_prefill_budget_spreads_a_queue_over_iterations() -> None:
    outcome = run([2, 2, 2, 2], num_ranks=1, max_prefill_tokens=25)
    assert outcome.iterations.prefill_tokens[:, 0].tolist() == [20, 20, 0]
    assert outcome.finished_at == (3, 3, 3, 3)


def test_overlap_runs_a_finished_response_once_more() -> None:
    assert run([3], num_ranks=1, extra_iterations_after_end=1).iterations.num_iterations == 4


def test_a_group_without_tokens_has_no_iteration() -> None:
    responses = [response(0, 2), response(1, 2, arrival=500)]
    outcome = simulate_step(responses, RoundRobin(2), members=[0, 1], limits=Limits())
    assert outcome.iterations.num_iterations == 4


def test_a_placement_that_makes_responses_wait_is_asked_again() -> None:
    responses = [response(index, length) for index, length in enumerate([4, 2, 3])]
    outcome = simulate_step(responses, LeastInflight(2, 1), members=[0, 1], limits=Limits())
    assert outcome.finished_on == (0, 1, 1)
    assert outcome.finished_at == (4, 2, 5)


def naive_finish(lengths: Sequence[int], num_ranks: int, limit: int) -> tuple[list[int], int]:
    """The same engine one iteration at a time, without KV bounds."""
    queues = [[i for i in range(len(lengths)) if i % num_ranks == rank] for rank in range(num_ranks)]
    running: list[dict[int, int]] = [{} for _ in range(num_ranks)]
    finished, now, idle = [0] * len(lengths), 0, 0
    while any(queues) or any(running):
        now += 1
        for queue, batch in zip(queues, running, strict=True):
            admitted = queue[: max(0, limit - len(batch))]
            del queue[: len(admitted)]
            idle += not admitted and not batch
            for index in admitted or list(batch):
                batch[index] = batch.get(index, 0) + 1
                if batch[index] == lengths[index]:
                    finished[index] = now
                    del batch[index]
    return finished, idle


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=25),
    num_ranks=st.integers(1, 5),
    limit=st.integers(1, 6),
)
def test_jumping_gives_what_single_iterations_give(lengths: list[int], num_ranks: int, limit: int) -> None:
    outcome = run(lengths, num_ranks, running_limit_per_rank=limit)
    finished, idle = naive_finish(lengths, num_ranks, limit)
    assert list(outcome.finished_at) == finished
    assert outcome.iterations.num_iterations == max(finished)
    assert outcome.iterations.idle_worker_iterations == idle


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    num_ranks=st.integers(1, 3),
    pool=st.integers(80, 400),
)
def test_a_small_pool_is_never_overrun_and_every_token_is_made_once(
    lengths: list[int], num_ranks: int, pool: int
) -> None:
    responses = [response(index, length) for index, length in enumerate(lengths)]
    limits = Limits(kv_tokens=lambda num_members: pool)
    outcome = simulate_step(responses, RoundRobin(num_ranks), members=range(num_ranks), limits=limits)
    rows = outcome.iterations
    growth = rows.num_running * (rows.repeats[:, None] - 1)
    last = rows.context_tokens + (growth + 1) // 2
    assert (last <= pool).all()
    decoded = int((rows.num_running.sum(axis=1) * rows.repeats).sum())
    # A retraction costs a prefill more, which makes a token as a decode iteration would.
    assert decoded == sum(lengths) - len(lengths) - outcome.num_retractions


def test_a_full_pool_throws_back_the_response_with_the_fewest_tokens() -> None:
    # At most 100 tokens each: when the second comes, 177 are free, 0.7 x 95 of them kept for the first, and
    # the second counts for 110. Both together would need 195 when the first ends.
    responses = [
        replace(response(index, 90, arrival), max_new_tokens=100) for index, arrival in enumerate((0, 5))
    ]
    roomy, tight = (
        simulate_step(
            responses, RoundRobin(1), members=[0], limits=Limits(kv_tokens=lambda _, pool=pool: pool)
        )
        for pool in (195, 192)
    )
    assert roomy.num_retractions == 0
    assert tight.num_retractions == 1
    assert tight.finished_at[0] < tight.finished_at[1]
    # The retracted one re-prefills its prompt with the tokens so far, and keeps them.
    assert tight.iterations.prefill_tokens[:, 0].max() > 90


@dataclass
class Scripted:
    """Orders one decision when asked for the first time at or after an iteration's second."""

    decision: ReleaseDecision
    views: list[GroupView] = field(default_factory=list)

    def decide(self, view: GroupView) -> ReleaseDecision:
        self.views.append(view)
        return self.decision if len(self.views) == 1 else ReleaseDecision(reason="once is enough")


def run_released(
    lengths: Sequence[int], decision: ReleaseDecision, **limits: int
) -> tuple[StepOutcome, Scripted]:
    policy = Scripted(decision)
    outcome = simulate_step(
        [response(index, length) for index, length in enumerate(lengths)],
        RoundRobin(2),
        members=[0, 1],
        limits=Limits(**limits),
        release=policy,
        policy_clock=CountingClock(),
    )
    return outcome, policy


def test_a_drained_member_that_leaves_stops_counting_at_the_switch() -> None:
    outcome, policy = run_released([30, 5], ReleaseDecision(leavers=(1,), reason="drained"))
    assert policy.views[0].responses[1] == ()
    assert [one.generated_tokens for one in policy.views[0].responses[0]] == [5]
    assert outcome.iterations.worker_iterations == 30 + 5
    assert outcome.iterations.num_switches == 1
    # 5 iterations and the prefill's half second before; the stall after it.
    assert outcome.decisions[0].at_s == 5.5
    assert outcome.policy_s == 30 + 0.5 + 10


def test_a_moved_response_keeps_its_tokens_and_is_prefilled_with_them() -> None:
    move = Move(response_id="r1", source=1, target=0)
    outcome, policy = run_released([40, 30], ReleaseDecision(leavers=(1,), moves=(move,), reason="move"))
    assert policy.views[0].at_s == 16.5
    assert outcome.moves[0].generated_tokens == 16
    assert outcome.iterations.prefill_tokens.tolist()[2] == [10 + 16, 0]
    # The prefill gives r1 its 17th token while r0 waits an iteration.
    assert outcome.finished_at == (41, 30)
    assert outcome.finished_on == (0, 0)
    assert outcome.iterations.worker_iterations == 2 * 16 + 25


def test_an_order_may_take_iterations_and_nothing_else_is_ordered_meanwhile() -> None:
    drained = ReleaseDecision(leavers=(1,), reason="drained")
    outcome, policy = run_released([60, 5], drained, release_latency_iterations=20)
    assert outcome.iterations.worker_iterations == 60 + 5 + 20
    # Asked at the drained rank, then not before the order is through.
    assert [view.members for view in policy.views[:2]] == [(0, 1), (0,)]
    move = ReleaseDecision(leavers=(1,), moves=(Move(response_id="r1", source=1, target=0),), reason="move")
    late = {"move_latency_iterations": 3, "release_latency_iterations": 5}
    outcome, _ = run_released([40, 30], move, **late)
    assert outcome.moves[0].generated_tokens == 16 + 3
    assert outcome.finished_at == (41, 30)
    assert outcome.iterations.worker_iterations == 41 + 16 + 5


def test_a_response_that_ends_before_its_move_stays_where_it_was() -> None:
    move = ReleaseDecision(leavers=(1,), moves=(Move(response_id="r1", source=1, target=0),), reason="move")
    late = {"move_latency_iterations": 5, "release_latency_iterations": 5}
    outcome, _ = run_released([40, 17], move, **late)
    assert outcome.moves == ()
    assert outcome.finished_on == (0, 1)
    assert outcome.iterations.worker_iterations == 40 + 16 + 5


@pytest.mark.parametrize(
    ("leavers", "moves", "outcome"),
    [
        ((1,), (), "rank 1 would leave with 1 responses"),
        ((0, 1), (), "leavers [0, 1] of members (0, 1)"),
        ((1,), (Move(response_id="r0", source=1, target=0),), "r0 cannot move from rank 1 to 0"),
    ],
)
def test_a_decision_that_does_not_fit_is_refused_and_counted(
    leavers: tuple[int, ...], moves: tuple[Move, ...], outcome: str
) -> None:
    result, _ = run_released([40, 30], ReleaseDecision(leavers=leavers, moves=moves))
    assert [fact.outcome for fact in result.decisions] == [outcome]
    assert result.num_refused == 1
    assert result.iterations.worker_iterations == 2 * 40


def test_both_clocks_are_reported_between_decisions() -> None:
    seen: list[tuple[int, float, float]] = []

    def observe(*, num_ranks: int, predicted_s: float, observed_s: float) -> None:
        seen.append((num_ranks, predicted_s, observed_s))

    class Slow(CountingClock):
        def decode_s(self, load: GroupLoad) -> float:
            return 2.0

    outcome = simulate_step(
        [response(0, 40)],
        RoundRobin(1),
        members=[0],
        limits=Limits(),
        release=Scripted(ReleaseDecision()),
        policy_clock=CountingClock(),
        truth_clock=Slow(),
        observe=observe,
    )
    # An iteration each, those that prefill left out; the policy sees the time that passed.
    assert seen[:2] == [(1, 1.0, 2.0), (1, 1.0, 2.0)]
    assert outcome.policy_s == 2 * 40 + 0.5


def test_a_response_longer_than_it_may_become_is_refused() -> None:
    with pytest.raises(ValueError, match="1001 tokens of at most 1000"):
        run([1001], num_ranks=1)
