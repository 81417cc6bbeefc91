"""The rollout phase of a step: responses drawn, streamed into the ledger, and scored as they finish."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from flexfloor.config import TrainConfig
from flexfloor.data.reward_pool import RewardPool
from flexfloor.driver.ahead import LogprobsAhead
from flexfloor.driver.prompts import TokenizedPrompt, Tokenizer
from flexfloor.driver.recorded import recorded_state, whole_step
from flexfloor.driver.step_scheduler import StepBatch, StepScheduler
from flexfloor.driver.worker_uses import worker_use
from flexfloor.errors import DeadlineExceeded, FlexfloorError
from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint
from flexfloor.report.console import Advance, RunConsole
from flexfloor.report.timeline import write_step_timeline
from flexfloor.rollout.engine_client import EngineClient
from flexfloor.rollout.iteration_log import iterations_path, save_iterations
from flexfloor.rollout.ledger import Ledger, step_path
from flexfloor.rollout.release_control import RejoinFailed
from flexfloor.rollout.scheduled_step import Elasticity, ScheduledResult, Watchers, replayed, run_scheduled
from flexfloor.rollout.step import StepLimits, StepProgress
from flexfloor.rollout.step_state import StepState
from flexfloor.schedule_record import StepSchedule, read_schedule, schedule_path, write_schedule
from flexfloor.scheduling.decision import ReleasePolicy
from flexfloor.scheduling.plan import StepPlan
from flexfloor.scheduling.restart import RestartPriced
from flexfloor.types import Response, ResponseRequest

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 10.0
_WATCH_INTERVAL_S = 0.5

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOutcome:
    """A complete step: every request with its response and reward."""

    requests: tuple[ResponseRequest, ...]
    """In data order, whatever the order of submission was."""
    drawn: ScheduledResult
    rewards: dict[str, float]
    """By response_id."""
    schedule: StepSchedule
    is_replayed: bool = False
    """Every response was on record."""


class RolloutPhase:
    """Draws and scores steps on one server. `check` raises when a process of the run has ended.

    `on_ready` is called whenever a server has become ready.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        server_url: str,
        membership_folder: Path | None,
        iteration_log: Path | None,
        scheduler: StepScheduler,
        tokenizer: Tokenizer,
        rewards: RewardPool,
        console: RunConsole,
        check: Callable[[], None],
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._server_url = server_url
        self._membership_folder = membership_folder
        self._iteration_log = iteration_log
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._console = console
        self._check = check
        self._on_ready = on_ready
        self._run_dir = Path(config.run_dir)
        self._ledger_dir = self._run_dir / "ledger"
        self._ledger_dir.mkdir(parents=True, exist_ok=True)

    def use_server(self, url: str) -> None:
        """From now on draw from another server; `wait_ready` before the next step."""
        self._server_url = url

    def wait_ready(self) -> None:
        """Wait for the server; ChildProcessError with its last lines if it ends instead."""
        timeout_s = self._config.cluster.server_start_timeout_s

        async def wait() -> None:
            async with self._engine() as engine:
                await engine.wait_ready(timeout_s, check_alive=self._check)

        asyncio.run(wait())
        self._on_ready()

    def run(
        self,
        prompts: Sequence[TokenizedPrompt],
        requests: Sequence[ResponseRequest],
        *,
        batch: StepBatch,
        rollout_step: int,
        weight_version: int,
        weight_checksum: str,
        ahead: LogprobsAhead | None = None,
    ) -> RolloutOutcome:
        """`prompts` are those of `batch`, and `requests` are theirs. `ahead` uses the released workers.

        A step that is on record whole, drawn by these very weights, is not drawn again. One that is there in
        part goes on where it was broken off.
        """
        plan = self._scheduler.plan(requests)
        scoring = _Scoring(prompts, self._tokenizer, self._rewards)

        def on_response(response: Response) -> None:
            scoring.submit(response)
            if ahead is not None:
                ahead.on_response(response)

        state = self._recorded(rollout_step, weight_version, weight_checksum)
        whole = None if state is None else whole_step(state, requests)
        with self._console.phase("rollout", len(requests)) as advance:
            if whole is not None and state is not None:
                drawn = replayed(whole, state, num_ranks=self._config.rollout.ep_size)
                for response in whole:
                    on_response(response)
            else:
                watchers = Watchers(
                    on_response=on_response,
                    on_progress=lambda progress: advance(progress.num_finished, _note(progress)),
                )
                work = self._draw(
                    requests, plan, rollout_step, weight_version, weight_checksum, watchers, ahead
                )
                drawn = asyncio.run(_watched(work, self._check))
        if ahead is not None:
            ahead.rollout_ended()
        schedule = self._record(rollout_step, batch, plan, drawn, is_replayed=whole is not None)
        # A call in a worker is bounded by reward_timeout_s; the queue in front of it is at most one step.
        rounds = -(-len(requests) // self._config.data.reward_workers)
        with self._console.phase("reward", len(requests)) as advance:
            rewards = scoring.collect(self._config.data.reward_timeout_s * rounds + 60.0, advance)
        return RolloutOutcome(
            requests=tuple(requests),
            drawn=drawn,
            rewards=rewards,
            schedule=schedule,
            is_replayed=whole is not None,
        )

    def settle(self) -> None:
        """Of a server that a run before this one may have left in mid-step: no request, every rank back.

        Raises RuntimeError with the manager's reason, or DeadlineExceeded.
        """
        if self._config.cluster.server_url is None:
            return
        asyncio.run(self._abort_all())
        if self._membership_folder is not None:
            timeout_s = self._config.membership.operation_timeout_s
            with DriverClient(Endpoint.read(self._membership_folder), timeout_s=timeout_s) as client:
                result = client.rejoin()
            if not result.ok:
                raise RejoinFailed(f"ranks that left in a run before this one stay away: {result.reason}")

    def lost_ranks(self) -> tuple[int, ...]:
        """Of the server now, as far as its membership can be asked."""
        if self._membership_folder is None:
            return ()
        try:
            endpoint = Endpoint.read(self._membership_folder)
            with DriverClient(endpoint, timeout_s=STATUS_TIMEOUT_S) as client:
                return client.status().lost
        except (OSError, ValueError, FlexfloorError):
            # Whoever asks has a failure in hand that says more.
            return ()

    async def _abort_all(self) -> None:
        async with self._engine() as engine:
            await engine.abort()

    def _recorded(self, rollout_step: int, weight_version: int, weight_checksum: str) -> StepState | None:
        state, story = recorded_state(
            self._ledger_dir,
            rollout_step=rollout_step,
            weight_version=weight_version,
            weight_checksum=weight_checksum,
        )
        if story:
            logger.info("event=recorded_step rollout_step=%d %s", rollout_step, story)
            self._console.say(f"step {rollout_step + 1}: {story}")
        return state

    async def _draw(
        self,
        requests: Sequence[ResponseRequest],
        plan: StepPlan,
        rollout_step: int,
        weight_version: int,
        weight_checksum: str,
        watchers: Watchers,
        ahead: LogprobsAhead | None,
    ) -> ScheduledResult:
        opened = Ledger.open(
            step_path(self._ledger_dir, rollout_step),
            rollout_step=rollout_step,
            weight_version=weight_version,
            num_responses=len(requests),
            weight_checksum=weight_checksum,
        )
        with opened as ledger:
            async with self._engine() as engine:
                return await run_scheduled(
                    requests,
                    engine=engine,
                    plan=plan,
                    placement=self._scheduler.placement(plan),
                    ledger=ledger,
                    weight_version=weight_version,
                    limits=StepLimits.from_config(self._config),
                    watchers=watchers,
                    elasticity=self._elasticity(rollout_step, ahead),
                    iteration_log=self._iteration_log,
                )

    def _elasticity(self, rollout_step: int, ahead: LogprobsAhead | None) -> Elasticity | None:
        if self._membership_folder is None:
            return None
        is_last_step = rollout_step == self._config.num_steps - 1
        use = worker_use(self._config, os.environ, is_last_step=is_last_step) if ahead is None else ahead
        return Elasticity(
            folder=self._membership_folder,
            timeout_s=self._config.membership.operation_timeout_s,
            policy=self._release_policy(is_last_step=is_last_step),
            prediction=self._scheduler.prediction,
            step_time=self._scheduler.step_time(),
            decision_interval_tokens=self._config.scheduling.decision_interval_iterations,
            use=use,
        )

    def _release_policy(self, *, is_last_step: bool) -> ReleasePolicy:
        policy, release = self._scheduler.release_policy(), self._config.release
        if not release.every_step or is_last_step:
            return policy
        price = self._scheduler.profile.price
        return RestartPriced(policy=policy, restart_s=release.restart_s, price=price)

    def _record(
        self,
        rollout_step: int,
        batch: StepBatch,
        plan: StepPlan,
        drawn: ScheduledResult,
        *,
        is_replayed: bool,
    ) -> StepSchedule:
        """Into the run directory and the length history."""
        planned = self._scheduler.planned_prompts()
        calibration = self._scheduler.observe(drawn.result.responses, rollout_step=rollout_step)
        path = schedule_path(self._run_dir, rollout_step)
        if is_replayed and path.exists():
            # It tells more of how the step was drawn than its ledger does.
            return read_schedule(path)
        schedule = step_schedule(
            rollout_step, num_ranks=self._config.rollout.ep_size, batch=batch, plan=plan, drawn=drawn
        )
        schedule = msgspec.structs.replace(schedule, prompts=planned, calibration=calibration)
        write_schedule(self._run_dir, schedule)
        if drawn.iterations is not None:
            save_iterations(iterations_path(self._run_dir, rollout_step), drawn.iterations)
        write_step_timeline(self._run_dir, rollout_step)
        return schedule

    def _engine(self) -> EngineClient:
        rollout = self._config.rollout
        return EngineClient(self._server_url, temperature=rollout.temperature, top_p=rollout.top_p)


def step_schedule(
    rollout_step: int, *, num_ranks: int, batch: StepBatch, plan: StepPlan, drawn: ScheduledResult
) -> StepSchedule:
    """The record of a step, without what was predicted of its prompts."""
    return StepSchedule(
        rollout_step=rollout_step,
        num_ranks=num_ranks,
        wall_s=drawn.occupancy.wall_s,
        batching="length_bucketed" if batch.is_bucketed else "fifo",
        batching_reason=batch.reason,
        placement=plan.placement,
        placement_reason=plan.reason,
        starting_members=plan.members,
        predicted_peak_kv_tokens=plan.predicted_peak_kv_tokens,
        kv_capacity_tokens=plan.kv_capacity_tokens,
        num_retractions=0 if drawn.iterations is None else drawn.iterations.num_retractions,
        decisions=drawn.decisions,
        absences=drawn.absences,
    )


class _Scoring:
    """Rewards of one step, computed while the rest of it still decodes."""

    def __init__(self, prompts: Sequence[TokenizedPrompt], tokenizer: Tokenizer, rewards: RewardPool) -> None:
        self._prompts = {item.prompt.prompt_id: item.prompt for item in prompts}
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._futures: dict[str, Future[float]] = {}

    def submit(self, response: Response) -> None:
        text = self._tokenizer.decode(response.token_ids, skip_special_tokens=True)
        self._futures[response.response_id] = self._rewards.submit(
            self._prompts[response.prompt_id], response.response_id, text
        )

    def collect(self, timeout_s: float, advance: Advance) -> dict[str, float]:
        """Rewards by response_id; RewardError of the first that failed, DeadlineExceeded if one hangs."""
        rewards: dict[str, float] = {}
        for response_id, future in self._futures.items():
            try:
                rewards[response_id] = future.result(timeout_s)
            except FutureTimeoutError as error:
                raise DeadlineExceeded(
                    f"the reward of response {response_id} did not come in {timeout_s:g} s"
                ) from error
            advance(len(rewards))
        return rewards


def _note(progress: StepProgress) -> str:
    ranks = " ".join(str(count) for count in progress.inflight)
    return f"{progress.num_tokens} tokens, running per rank: {ranks}"


async def _watched(work: Awaitable[Value], check: Callable[[], None]) -> Value:
    """Await `work`, but give it up as soon as `check` raises."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_WATCH_INTERVAL_S)
            if not task.done():
                check()
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=10.0)
