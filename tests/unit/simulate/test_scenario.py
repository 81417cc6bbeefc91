"""Whole passes: every response once, controls, what the levers do to a small trace, what is never leaked."""

from dataclasses import replace

import numpy as np
import pytest

from flexfloor.scheduling.clocks import H200, GpuClock, NeutralClock, make_clock
from flexfloor.simulate.bounds import free_migration_bound
from flexfloor.simulate.forecast import Drawn, Forecast, Knowledge
from flexfloor.simulate.results import Ratios, ScenarioResult
from flexfloor.simulate.scenario import Machine, Scheme, Workload, run_scenario
from flexfloor.simulate.study import (
    BUCKETED,
    DRAINED_RELEASE,
    GUARDED_RELEASE,
    STATIC,
    best_static_gain,
    run_study,
    sized,
    sizes,
)
from flexfloor.simulate.traces import Regime, generate

REGIME = Regime(
    name="small",
    num_ranks=4,
    num_prompts_per_step=8,
    num_responses_per_prompt=4,
    cap_tokens=2000,
    runaway_share=0.0,
    median_tokens=200,
    variance_split=(0.8, 0.05, 0.15),
)
TRACE = generate(REGIME, num_steps=4, num_passes=3, seed=0)
WORKLOAD = Workload(trace=TRACE, num_prompts_per_step=8, num_history_passes=2)
MACHINE = Machine(num_ranks=4, floor=1, clock=make_clock("h200"), decision_interval_iterations=256)


@pytest.fixture(scope="module")
def static() -> ScenarioResult:
    return run_scenario(WORKLOAD, STATIC, MACHINE)


def test_a_static_group_is_there_in_every_iteration(static: ScenarioResult) -> None:
    assert static.num_tokens == TRACE.lengths[2].sum()
    assert [step.worker_iterations for step in static.steps] == [
        4 * step.num_iterations for step in static.steps
    ]
    # Every response starts at once, so a step has as many iterations as its longest has tokens.
    assert [step.num_iterations for step in static.steps] == [step.longest_tokens for step in static.steps]
    assert static.num_switches == static.num_moves == 0


@pytest.mark.parametrize("scheme", [BUCKETED, DRAINED_RELEASE, GUARDED_RELEASE], ids=lambda one: one.name)
def test_every_scheme_makes_the_same_tokens(scheme: Scheme, static: ScenarioResult) -> None:
    run = run_scenario(WORKLOAD, scheme, MACHINE)
    assert run.num_tokens == static.num_tokens
    assert sum(step.num_responses for step in run.steps) == TRACE.lengths[2].size
    assert run.num_refused == 0


def test_buckets_shorten_the_pass_and_released_workers_count_for_less(static: ScenarioResult) -> None:
    bucketed = Ratios.of(run_scenario(WORKLOAD, BUCKETED, MACHINE), static)
    drained = Ratios.of(run_scenario(WORKLOAD, DRAINED_RELEASE, MACHINE), static)
    assert bucketed.throughput > 1.2
    assert bucketed.occupied == pytest.approx(bucketed.throughput)
    assert drained.occupied > bucketed.occupied
    assert drained.worker_iterations > 1.05 * bucketed.worker_iterations


def test_without_history_batches_stay_in_data_order_and_a_release_still_works(static: ScenarioResult) -> None:
    cold = replace(WORKLOAD, knowledge=Knowledge.cold)
    run = run_scenario(cold, DRAINED_RELEASE, MACHINE)
    assert {step.batching_reason for step in run.steps} == {"no history: predictions do not rank prompts yet"}
    assert [step.num_tokens for step in run.steps] == [step.num_tokens for step in static.steps]
    assert run.worker_iterations < static.worker_iterations


def test_a_run_is_fixed_by_its_seed() -> None:
    assert run_scenario(WORKLOAD, GUARDED_RELEASE, MACHINE) == run_scenario(
        WORKLOAD, GUARDED_RELEASE, MACHINE
    )


def test_a_smaller_control_has_its_own_size(static: ScenarioResult) -> None:
    half = run_scenario(WORKLOAD, sized(STATIC, 2), MACHINE)
    assert half.num_ranks == 2
    assert half.worker_iterations * 2 == static.worker_iterations


def test_only_prepared_member_sets_are_shrunk_to() -> None:
    machine = replace(MACHINE, member_sets=((0, 1),))
    run = run_scenario(WORKLOAD, GUARDED_RELEASE, machine)
    leavers = {fact.decision.leavers for step in run.steps for fact in step.decisions}
    assert leavers == {(2, 3)}


def test_a_small_pool_makes_responses_wait_and_costs_no_token(static: ScenarioResult) -> None:
    tight = replace(MACHINE, kv_tokens=lambda num_members: 3000)
    run = run_scenario(WORKLOAD, STATIC, tight)
    assert run.num_tokens == static.num_tokens
    assert run.wall_s > 1.5 * static.wall_s


def test_a_wrong_cost_model_ends_no_run(static: ScenarioResult) -> None:
    wrong = replace(MACHINE, clock=make_clock("h20"), policy_clock=NeutralClock())
    run = run_scenario(WORKLOAD, GUARDED_RELEASE, wrong)
    assert run.num_tokens == static.num_tokens


@pytest.mark.parametrize(
    "factors",
    [{"hop_s": 0.5}, {"fixed_s": 0.5}, {"fixed_s": 2.0}, {"hop_s": 0.33, "fixed_s": 0.4}],
    ids=lambda factors: ",".join(factors),
)
def test_moving_by_a_wrong_clock_costs_no_throughput_once_a_pass_has_corrected_it(
    factors: dict[str, float],
) -> None:
    trace = generate(REGIME, num_steps=4, num_passes=4, seed=0)
    workload = replace(WORKLOAD, trace=trace)
    truth, believed = GpuClock(spec=H200.scaled(**factors)), GpuClock()
    machine = replace(MACHINE, clock=truth, policy_clock=believed, decision_interval_iterations=32)
    still, moving = (
        sum(step.wall_s for step in run_scenario(workload, scheme, machine).steps[4:])
        for scheme in (DRAINED_RELEASE, GUARDED_RELEASE)
    )
    assert still / moving >= 0.97


def test_a_prediction_never_uses_the_pass_that_is_being_drawn() -> None:
    other = replace(TRACE, lengths=TRACE.lengths.copy())
    other.lengths[2] = other.lengths[2, ::-1]
    forecasts = [Forecast(trace, Knowledge.history) for trace in (TRACE, other)]
    for trace, forecast in zip((TRACE, other), forecasts, strict=True):
        for pass_index in (0, 1):
            forecast.begin_pass(pass_index)
            drawn = [Drawn(prompt_index=i, lengths=tuple(trace.lengths[pass_index, i])) for i in range(32)]
            forecast.observe(pass_index, drawn)
        forecast.begin_pass(2)
    mine, theirs = ([one.of_prompt(i) for i in range(32)] for one in forecasts)
    assert mine == theirs
    assert len(set(mine)) == 32


def test_the_oracle_knows_a_response_and_the_mean_of_its_group() -> None:
    forecast = Forecast(TRACE, Knowledge.oracle)
    forecast.begin_pass(2)
    assert forecast.of_response(0, 345).expected_tokens == pytest.approx(345)
    assert forecast.of_prompt(3).expected_tokens == pytest.approx(TRACE.lengths[2, 3].mean())


def test_reversal_takes_the_longest_for_the_shortest() -> None:
    forecast, true = Forecast(TRACE, Knowledge.reversed), Forecast(TRACE, Knowledge.history)
    for one in (forecast, true):
        one.begin_pass(0)
        one.observe(0, [Drawn(prompt_index=i, lengths=tuple(TRACE.lengths[0, i])) for i in range(32)])
        one.begin_pass(1)
    expected = np.array([[one.of_prompt(i).expected_tokens for i in range(32)] for one in (true, forecast)])
    assert (np.argsort(expected[0]) == np.argsort(-expected[1])).all()


def test_no_schedule_is_below_the_free_migration_bound() -> None:
    run = run_scenario(WORKLOAD, replace(DRAINED_RELEASE, batching=STATIC.batching), MACHINE)
    order = WORKLOAD.order(2)
    for index, step in enumerate(run.steps):
        batch = order[8 * index : 8 * index + 8]
        bound = free_migration_bound(
            TRACE.lengths[2, batch].reshape(-1).tolist(),
            np.repeat(TRACE.prompt_tokens[batch], 4).tolist(),
            num_ranks=4,
            floor=1,
            clock=MACHINE.clock,
            price=0.0,
        )
        assert 0.2 * step.occupied_worker_s < bound.occupied_worker_s < step.occupied_worker_s


def test_the_bound_by_hand_counts_iterations_of_the_ranks_that_are_needed() -> None:
    bound = free_migration_bound([10, 4], [1, 1], num_ranks=2, floor=1, clock=NeutralClock(), price=0.0)
    # One rank is enough under a clock that does not mind the load.
    assert (bound.wall_s, bound.occupied_worker_s) == (10, 10)
    pools = free_migration_bound(
        [10, 4],
        [1, 1],
        num_ranks=2,
        floor=1,
        clock=NeutralClock(),
        price=0.0,
        # Two responses of middle age 2 have 6 tokens, one of age 7 has 8: only the latter fits one rank.
        kv_tokens=lambda num_members: 8 if num_members == 2 else 5,
    )
    assert pools.occupied_worker_s == 2 * 10


def test_a_study_compares_sizes_by_one_price() -> None:
    seen: list[tuple[int, int, str]] = []
    study = run_study(
        WORKLOAD,
        MACHINE,
        window_steps=4,
        price=3.0,
        advance=lambda done, total, name: seen.append((done, total, name)),
    )
    assert [run.scheme for run in study.runs[:3]] == ["static", "bucketed", "drained release"]
    assert [run.num_ranks for run in study.guarded_by_size] == [4, 3, 2, 1]
    assert seen[0] == (0, 12, "static")
    assert seen[-1] == (12, 12, "")
    costs = [run.objective(3.0, 4) for run in study.guarded_by_size]
    assert study.recommended is study.guarded_by_size[int(np.argmin(costs))]


def test_sizes_are_eighths_down_to_the_floor() -> None:
    assert sizes(16, 4) == (16, 14, 12, 10, 8, 6, 4)
    assert sizes(4, 2) == (4, 3, 2)


def result(num_ranks: int, wall_s: float, occupied_s: float) -> ScenarioResult:
    step = run_scenario(WORKLOAD, STATIC, MACHINE).steps[0]
    step = replace(step, num_tokens=1000, wall_s=wall_s, occupied_worker_s=occupied_s)
    return ScenarioResult(scheme="one", num_ranks=num_ranks, steps=(step,))


def test_the_rival_is_the_smallest_static_group_that_is_as_fast() -> None:
    static_sizes = [result(4, 10.0, 40.0), result(3, 11.0, 33.0), result(2, 13.0, 26.0)]
    assert best_static_gain(result(4, 12.0, 22.0), static_sizes) == pytest.approx(33 / 22)
    # Faster than all of them: against the fastest.
    assert best_static_gain(result(4, 9.0, 20.0), static_sizes) == pytest.approx(40 / 20)


def test_runs_over_other_responses_are_not_compared(static: ScenarioResult) -> None:
    with pytest.raises(ValueError, match="tokens, static"):
        Ratios.of(result(4, 1.0, 4.0), static)


def test_a_trace_must_leave_a_pass_to_count() -> None:
    with pytest.raises(ValueError, match="the trace has 3 passes"):
        Workload(trace=TRACE, num_prompts_per_step=8, num_history_passes=3)


def test_the_neutral_clock_counts_the_iterations_of_a_simulated_step(static: ScenarioResult) -> None:
    neutral = run_scenario(WORKLOAD, STATIC, replace(MACHINE, clock=NeutralClock()))
    assert neutral.wall_s == sum(step.num_iterations for step in static.steps)
    assert neutral.occupied_worker_s == static.worker_iterations
