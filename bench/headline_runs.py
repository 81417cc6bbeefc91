"""Real rollout steps of bench/headline.py: one configuration, one trace, one server, lengths forced."""

import asyncio
import json
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexfloor.config.choices import Batching, Placement, ReleaseRule, StartingSize
from flexfloor.config.scheduling import SchedulingConfig
from flexfloor.data.order import PromptOrder
from flexfloor.driver.rollout_phase import step_schedule
from flexfloor.driver.step_scheduler import KnownPrompt, RolloutShape, StepBatch, StepScheduler
from flexfloor.iterations import StepIterations
from flexfloor.report.timeline import write_step_timeline
from flexfloor.rollout.engine_client import EngineClient
from flexfloor.rollout.ledger import Ledger, step_path
from flexfloor.rollout.scheduled_step import Elasticity, ScheduledResult, Watchers, run_scheduled
from flexfloor.rollout.step import StepLimits
from flexfloor.schedule_record import write_schedule
from flexfloor.scheduling.cost import Clock
from flexfloor.scheduling.history import LengthHistory
from flexfloor.scheduling.observation import LengthObservation
from flexfloor.scheduling.plan import StepPlan
from flexfloor.types import FinishReason, Response, ResponseRequest

NUM_RANKS = 4
BATCH_SIZE = 16
WARM_RUN = "warm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A configuration to measure."""

    name: str = ""

    batching: Batching = Batching.fifo
    placement: Placement = Placement.round_robin
    release: ReleaseRule | None = None
    """None: nobody leaves before the end of the step."""
    num_ranks: int = NUM_RANKS
    """Fewer: the step runs on so many of the ranks, and the others are out of the group all the time."""
    starting_size: StartingSize = StartingSize.full
    floor: int = 1
    """4 H200 can hold the modelled model on one of them (`flexfloor-plan`)."""
    what: str = ""


_BUCKETED = Setup(batching=Batching.length_bucketed, placement=Placement.balanced)
_ALL = replace(_BUCKETED, release=ReleaseRule.guarded)
_SETUPS: dict[str, Setup] = {
    "static": Setup(what="verl: data order, round robin, nobody leaves"),
    "placement": Setup(placement=Placement.balanced, what="balanced placement, longest first"),
    "bucketing": Setup(batching=Batching.length_bucketed, what="length-bucketed batches"),
    "release": Setup(release=ReleaseRule.drained, what="drained ranks leave"),
    "release_move": Setup(release=ReleaseRule.guarded, what="ranks leave, stragglers move"),
    "drained": replace(_BUCKETED, release=ReleaseRule.drained, what="all but moving"),
    "guarded": replace(_ALL, what="FlexFloor's default: all levers"),
    "auto": replace(_ALL, starting_size=StartingSize.auto, what="the same, and a step may start smaller"),
    "eager": replace(_ALL, release=ReleaseRule.eager, what="all levers, wall time cheaper"),
    "max": replace(_ALL, release=ReleaseRule.max, what="all levers, worker time first"),
    "guarded_floor2": replace(_ALL, floor=2, what="the default with a floor of 2"),
    "half": Setup(num_ranks=2, what="CONTROL: static group of half the size"),
    "half_bucketed": replace(_BUCKETED, num_ranks=2, what="CONTROL: the same, length-bucketed"),
}
SETUPS = {name: replace(setup, name=name) for name, setup in _SETUPS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedTrace:
    """A trace in tokens of the small model: one stands for `scale` of the trace's."""

    name: str
    cap_tokens: int
    prompts: tuple[tuple[int, ...], ...]
    """Token ids."""
    lengths: tuple[tuple[tuple[int, ...], ...], ...]
    """[pass][prompt][sample]"""

    @classmethod
    def read(cls, path: Path, scale: int, vocabulary: range) -> "ForcedTrace":
        found = json.loads(path.read_text())
        draw = random.Random(path.stem)
        return cls(
            name=path.stem,
            cap_tokens=-(-found["cap_tokens"] // scale),
            prompts=tuple(
                tuple(draw.choice(vocabulary) for _ in range(max(2, round(count / scale))))
                for count in found["prompt_tokens"]
            ),
            lengths=tuple(
                tuple(tuple(max(1, round(tokens / scale)) for tokens in group) for group in one_pass)
                for one_pass in found["lengths"]
            ),
        )

    def observations(self) -> list[LengthObservation]:
        """All passes but the last, as a history holds them."""
        return [
            LengthObservation(
                dataset=self.name,
                prompt_id=str(prompt),
                response_id=f"{index}/{prompt}/{sample}",
                run_id=WARM_RUN,
                rollout_step=index * len(self.prompts) + prompt // BATCH_SIZE,
                weight_version=0,
                pass_index=index,
                num_tokens=tokens,
                prompt_tokens=len(self.prompts[prompt]),
                is_truncated=tokens >= self.cap_tokens,
                cap_tokens=self.cap_tokens,
            )
            for index, one_pass in enumerate(self.lengths[:-1])
            for prompt, group in enumerate(one_pass)
            for sample, tokens in enumerate(group)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RanStep:
    """What a step left behind."""

    num_tokens: int
    wall_s: float
    iterations: StepIterations
    lengths: list[tuple[int, int]]
    """(dp_rank, tokens) of every response."""
    num_moves: int
    num_refused: int
    num_retractions: int
    tail_idle_share: float
    decisions: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One server with its folders, and what all configurations share."""

    url: str
    membership_folder: Path
    iteration_log: Path
    clock: Clock
    """Of the policies."""
    decision_interval_tokens: int
    seed: int
    num_steps: int
    work_dir: Path
    timelines: Path | None = None
    """Where pictures of the steps are kept, with what they were made from."""

    def run(self, setup: Setup, trace: ForcedTrace) -> list[RanStep]:
        """All steps of the trace's last pass under a fresh, warm history."""
        with LengthHistory.open(":memory:") as history:
            history.add(trace.observations())
            scheduler = self._scheduler(setup, trace, history)
            return [self._step(setup, trace, scheduler, step) for step in range(self.num_steps)]

    def _scheduler(self, setup: Setup, trace: ForcedTrace, history: LengthHistory) -> StepScheduler:
        return StepScheduler(
            SchedulingConfig(
                batching=setup.batching,
                placement=setup.placement,
                release=setup.release or ReleaseRule.drained,
                starting_size=setup.starting_size,
                decision_interval_iterations=self.decision_interval_tokens,
            ),
            RolloutShape(
                num_ranks=setup.num_ranks,
                batch_size=BATCH_SIZE,
                num_responses_per_prompt=len(trace.lengths[0][0]),
                max_response_tokens=trace.cap_tokens,
                max_running_requests=256 * setup.num_ranks,
                floor=min(setup.floor, setup.num_ranks),
            ),
            prompts=[
                KnownPrompt(prompt_id=str(index), num_tokens=len(prompt))
                for index, prompt in enumerate(trace.prompts)
            ],
            order=PromptOrder(num_prompts=len(trace.prompts), seed=self.seed),
            history=history,
            dataset=trace.name,
            run_id="measured",
            clock=self.clock,
            kv_tokens=lambda num_members: None,
            seed=self.seed,
        )

    def _step(self, setup: Setup, trace: ForcedTrace, scheduler: StepScheduler, step: int) -> RanStep:
        batch = scheduler.batch(step)
        requests = self._requests(trace, batch.indices, step)
        plan = scheduler.plan(requests)
        path = step_path(self.work_dir / "ledger", step)
        path.parent.mkdir(exist_ok=True)
        drawn = asyncio.run(self._draw(setup, trace, scheduler, requests, plan, path))
        if self.timelines is not None:
            self._keep(f"{trace.name}-{setup.name}", path, batch, plan, drawn)
        path.unlink()
        result, iterations = drawn.result, drawn.iterations
        # The engine was told each length as a cap, so it says of every response that it was cut off.
        scheduler.observe(responses_of(requests, trace.cap_tokens), rollout_step=step)
        wanted = {request.response_id: request.max_response_tokens for request in requests}
        assert iterations is not None
        drawn_tokens = {one.response_id: one.num_tokens for one in result.responses}
        assert drawn_tokens == wanted, "a length was not kept"
        return RanStep(
            num_tokens=drawn.occupancy.num_tokens,
            wall_s=drawn.occupancy.wall_s,
            iterations=iterations,
            lengths=[(one.dp_rank, one.num_tokens) for one in result.responses],
            num_moves=result.num_moves,
            num_refused=drawn.num_refused,
            num_retractions=iterations.num_retractions,
            tail_idle_share=iterations.idle_worker_iterations / iterations.worker_iterations,
            decisions=[
                {"at_s": one.at_s, "leavers": one.leavers, "moves": len(one.moves), "outcome": one.outcome}
                | {"reason": one.reason, "took_s": one.took_s}
                for one in drawn.decisions
            ],
        )

    def _requests(self, trace: ForcedTrace, indices: tuple[int, ...], step: int) -> list[ResponseRequest]:
        """In data order; the response's length is its cap, and no policy looks at that."""
        return [
            ResponseRequest(
                response_id=f"{step}/{index}/{sample}",
                rollout_step=step,
                prompt_id=str(index),
                sample_index=sample,
                prompt_token_ids=trace.prompts[index],
                max_response_tokens=tokens,
                sampling_seed=index * 1000 + sample,
            )
            for index in indices
            for sample, tokens in enumerate(trace.lengths[-1][index])
        ]

    async def _draw(
        self,
        setup: Setup,
        trace: ForcedTrace,
        scheduler: StepScheduler,
        requests: list[ResponseRequest],
        plan: StepPlan,
        path: Path,
    ) -> ScheduledResult:
        placement = plan.policy(num_ranks=NUM_RANKS, running_limit_per_rank=256)
        limits = StepLimits(
            context_tokens=2 * trace.cap_tokens + 64, response_timeout_s=300.0, max_attempts=3
        )
        opened = Ledger.open(
            path, rollout_step=requests[0].rollout_step, weight_version=0, num_responses=len(requests)
        )
        with opened as ledger:
            async with EngineClient(self.url, ignore_eos=True) as engine:
                # The same prompts come again in every configuration, and a cached prefix would be a gift.
                await engine.flush_cache()
                drawn = await run_scheduled(
                    requests,
                    engine=engine,
                    plan=plan,
                    placement=placement,
                    ledger=ledger,
                    weight_version=0,
                    limits=limits,
                    watchers=Watchers(on_response=lambda response: None),
                    elasticity=self._elasticity(setup, scheduler),
                    iteration_log=self.iteration_log,
                )
        return drawn

    def _keep(
        self, name: str, ledger: Path, batch: StepBatch, plan: StepPlan, drawn: ScheduledResult
    ) -> None:
        assert self.timelines is not None
        run_dir, step = self.timelines / name, drawn.result.responses[0].rollout_step
        (run_dir / "ledger").mkdir(parents=True, exist_ok=True)
        shutil.copy(ledger, step_path(run_dir / "ledger", step))
        write_schedule(run_dir, step_schedule(step, num_ranks=NUM_RANKS, batch=batch, plan=plan, drawn=drawn))
        write_step_timeline(run_dir, step)

    def _elasticity(self, setup: Setup, scheduler: StepScheduler) -> Elasticity | None:
        if setup.release is None and setup.num_ranks == NUM_RANKS:
            return None
        return Elasticity(
            folder=self.membership_folder,
            timeout_s=120.0,
            policy=None if setup.release is None else scheduler.release_policy(),
            prediction=scheduler.prediction,
            step_time=scheduler.step_time(),
            decision_interval_tokens=self.decision_interval_tokens,
        )


def responses_of(requests: list[ResponseRequest], cap_tokens: int) -> list[Response]:
    """What a model would have answered, as far as a length history looks: lengths that are its own."""
    return [
        Response(
            response_id=request.response_id,
            rollout_step=request.rollout_step,
            prompt_id=request.prompt_id,
            sample_index=request.sample_index,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=(0,) * request.max_response_tokens,
            logprobs=(0.0,) * request.max_response_tokens,
            dp_rank=0,
            weight_version=0,
            finish_reason=(
                FinishReason.length if request.max_response_tokens >= cap_tokens else FinishReason.stop
            ),
            cap_tokens=cap_tokens,
            started_at_s=0.0,
            finished_at_s=0.0,
        )
        for request in requests
    ]
