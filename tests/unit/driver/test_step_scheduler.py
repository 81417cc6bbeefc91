"""Windows, plans and what a step teaches: every prompt once a pass, the same after a restart."""

import random
from itertools import pairwise
from pathlib import Path

import pytest

from flexfloor.config.choices import Batching, Placement, ReleaseRule
from flexfloor.config.scheduling import SchedulingConfig
from flexfloor.data.order import PromptOrder
from flexfloor.driver.step_scheduler import KnownPrompt, RolloutShape, StepScheduler
from flexfloor.rollout.step_time import ModelledTime, WallTime
from flexfloor.scheduling.clocks import CorrectedClock, NeutralClock
from flexfloor.scheduling.cost import Clock
from flexfloor.scheduling.history import LengthHistory
from flexfloor.types import FinishReason, Response, ResponseRequest

NUM_PROMPTS, BATCH, SAMPLES, CAP = 24, 4, 4, 400
STEPS_PER_PASS = NUM_PROMPTS // BATCH


def make(history: LengthHistory, folder: Path | None = None, clock: Clock | None = None) -> StepScheduler:
    return StepScheduler(
        SchedulingConfig(
            batching=Batching.length_bucketed,
            placement=Placement.balanced,
            release=ReleaseRule.guarded,
            window_steps=4,
        ),
        RolloutShape(
            num_ranks=4,
            batch_size=BATCH,
            num_responses_per_prompt=SAMPLES,
            max_response_tokens=CAP,
            max_running_requests=64,
            floor=1,
        ),
        prompts=[KnownPrompt(prompt_id=f"p{index}", num_tokens=8) for index in range(NUM_PROMPTS)],
        order=PromptOrder(num_prompts=NUM_PROMPTS, seed=3),
        history=history,
        dataset="d",
        run_id="run",
        clock=clock or NeutralClock(),
        kv_tokens=lambda num_members: None,
        seed=3,
        folder=folder,
    )


def requests_of(scheduler: StepScheduler, step: int) -> list[ResponseRequest]:
    return [
        ResponseRequest(
            response_id=f"{step}/p{index}/{sample}",
            rollout_step=step,
            prompt_id=f"p{index}",
            sample_index=sample,
            prompt_token_ids=tuple(range(8)),
            max_response_tokens=CAP,
            sampling_seed=1,
        )
        for index in scheduler.batch(step).indices
        for sample in range(SAMPLES)
    ]


def answers(requests: list[ResponseRequest]) -> list[Response]:
    """Each prompt's responses are a fifth longer than those of the one before."""
    draw = random.Random(requests[0].rollout_step)
    return [_response(request, draw) for request in requests]


def _response(request: ResponseRequest, draw: random.Random) -> Response:
    tokens = min(CAP, max(1, round(5 * 1.2 ** int(request.prompt_id[1:]) * draw.uniform(0.97, 1.03))))
    return Response(
        response_id=request.response_id,
        rollout_step=request.rollout_step,
        prompt_id=request.prompt_id,
        sample_index=request.sample_index,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=(1,) * tokens,
        logprobs=(0.0,) * tokens,
        dp_rank=0,
        weight_version=request.rollout_step,
        finish_reason=FinishReason.length if tokens == CAP else FinishReason.stop,
        cap_tokens=CAP,
        started_at_s=0.0,
        finished_at_s=1.0,
    )


def run_steps(scheduler: StepScheduler, steps: range) -> list[tuple[int, ...]]:
    taken = []
    for step in steps:
        requests = requests_of(scheduler, step)
        plan = scheduler.plan(requests)
        assert sorted(plan.order) == sorted(request.response_id for request in requests)
        scheduler.observe(answers(requests), rollout_step=step)
        taken.append(scheduler.batch(step).indices)
    return taken


def test_every_prompt_is_taken_once_a_pass_and_like_lengths_share_a_step_once_they_are_known() -> None:
    with LengthHistory.open(":memory:") as history:
        scheduler = make(history)
        first = run_steps(scheduler, range(STEPS_PER_PASS))
        assert not scheduler.batch(0).is_bucketed
        assert "history" in scheduler.batch(0).reason or "predictions" in scheduler.batch(0).reason
        second = run_steps(scheduler, range(STEPS_PER_PASS, 2 * STEPS_PER_PASS))
    for taken in (first, second):
        assert sorted(index for batch in taken for index in batch) == list(range(NUM_PROMPTS))
    assert all(scheduler.batch(step).is_bucketed for step in range(STEPS_PER_PASS, 2 * STEPS_PER_PASS))
    # Prompts are numbered by length: within the window of four steps buckets do not overlap.
    spans = sorted((min(batch), max(batch)) for batch in second[:4])
    assert all(before[1] < after[0] for before, after in pairwise(spans))
    order = PromptOrder(num_prompts=NUM_PROMPTS, seed=3)
    window = {
        index for step in range(STEPS_PER_PASS, STEPS_PER_PASS + 4) for index in order.batch(step, BATCH)
    }
    assert {index for batch in second[:4] for index in batch} == window


def test_a_run_that_goes_on_in_mid_window_takes_the_prompts_that_are_left(tmp_path: Path) -> None:
    middle = STEPS_PER_PASS + 2
    with LengthHistory.open(tmp_path / "lengths.sqlite") as history:
        scheduler = make(history, tmp_path)
        run_steps(scheduler, range(middle))
        expected = [scheduler.batch(step).indices for step in range(STEPS_PER_PASS, STEPS_PER_PASS + 4)]
    with LengthHistory.open(tmp_path / "lengths.sqlite") as history:
        again = make(history, tmp_path)
        # More was learned since the window began, and still it is the window that was begun.
        assert [again.batch(step).indices for step in range(STEPS_PER_PASS, STEPS_PER_PASS + 4)] == expected


def test_a_damaged_window_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "window-0000-0000.json").write_text("{}")
    with LengthHistory.open(":memory:") as history, pytest.raises(ValueError, match="window-0000-0000"):
        make(history, tmp_path).batch(0)


def test_predictions_are_judged_and_told() -> None:
    with LengthHistory.open(":memory:") as history:
        scheduler = make(history)
        run_steps(scheduler, range(STEPS_PER_PASS))
        requests = requests_of(scheduler, STEPS_PER_PASS)
        scheduler.plan(requests)
        told = {prompt.prompt_id: prompt for prompt in scheduler.planned_prompts()}
        figures = scheduler.observe(answers(requests), rollout_step=STEPS_PER_PASS)
    assert set(told) == {request.prompt_id for request in requests}
    assert all(prompt.num_seen > 0 for prompt in told.values())
    assert figures["share_seen"] == 1.0
    assert figures["mean_abs_log_error"] < 0.5
    ordered = sorted(told.values(), key=lambda prompt: int(prompt.prompt_id[1:]))
    assert ordered[-1].expected_tokens > ordered[0].expected_tokens


def test_time_is_that_of_the_wall_where_the_clock_prices_this_machine() -> None:
    with LengthHistory.open(":memory:") as history:
        assert isinstance(make(history).step_time(), ModelledTime)
        corrected = make(history, clock=CorrectedClock(clock=NeutralClock()))
        assert isinstance(corrected.step_time(), WallTime)
