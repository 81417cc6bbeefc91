"""The rollout phase of a step: responses drawn, streamed into the ledger, and scored as they finish."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from flexfloor.config import TrainConfig
from flexfloor.data.reward_pool import RewardPool
from flexfloor.driver.batch import step_requests
from flexfloor.driver.prompts import TokenizedPrompt, Tokenizer
from flexfloor.errors import DeadlineExceeded
from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint
from flexfloor.report.console import Advance, RunConsole
from flexfloor.rollout.dispatcher import run_step
from flexfloor.rollout.engine_client import EngineClient
from flexfloor.rollout.leaving import Leaving
from flexfloor.rollout.ledger import Ledger, step_path
from flexfloor.rollout.occupancy import Occupancy, measure
from flexfloor.rollout.step import RolloutResult, StepLimits, StepProgress
from flexfloor.scheduling.place import PlacementPolicy, make_placement
from flexfloor.scheduling.release import DrainedRelease
from flexfloor.types import Response, ResponseRequest

_WATCH_INTERVAL_S = 0.5

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOutcome:
    """A complete step: every request with its response and reward."""

    requests: tuple[ResponseRequest, ...]
    result: RolloutResult
    rewards: dict[str, float]
    """By response_id."""
    occupancy: Occupancy
    num_released: int = 0
    """Ranks that left and stayed away to the end of the step."""
    num_refused: int = 0


class RolloutPhase:
    """Draws and scores steps on one server. `check` raises when a process of the run has ended."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        server_url: str,
        membership_folder: Path | None,
        tokenizer: Tokenizer,
        rewards: RewardPool,
        console: RunConsole,
        check: Callable[[], None],
    ) -> None:
        self._config = config
        self._server_url = server_url
        self._membership_folder = membership_folder
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._console = console
        self._check = check
        self._ledger_dir = Path(config.run_dir) / "ledger"
        self._ledger_dir.mkdir(parents=True, exist_ok=True)

    def wait_ready(self) -> None:
        """Wait for the server; ChildProcessError with its last lines if it ends instead."""
        timeout_s = self._config.cluster.server_start_timeout_s

        async def wait() -> None:
            async with self._engine() as engine:
                await engine.wait_ready(timeout_s, check_alive=self._check)

        asyncio.run(wait())

    def run(
        self, prompts: Sequence[TokenizedPrompt], *, rollout_step: int, weight_version: int
    ) -> RolloutOutcome:
        requests = step_requests(
            prompts, rollout_step=rollout_step, run_seed=self._config.seed, rollout=self._config.rollout
        )
        scoring = _Scoring(prompts, self._tokenizer, self._rewards)
        with self._console.phase("rollout", len(requests)) as advance:
            drawn = asyncio.run(
                _watched(self._draw(requests, rollout_step, weight_version, scoring, advance), self._check)
            )
        # A call in a worker is bounded by reward_timeout_s; the queue in front of it is at most one step.
        rounds = -(-len(requests) // self._config.data.reward_workers)
        with self._console.phase("reward", len(requests)) as advance:
            rewards = scoring.collect(self._config.data.reward_timeout_s * rounds + 60.0, advance)
        return replace(drawn, rewards=rewards)

    async def _draw(
        self,
        requests: Sequence[ResponseRequest],
        rollout_step: int,
        weight_version: int,
        scoring: "_Scoring",
        advance: Advance,
    ) -> RolloutOutcome:
        config = self._config
        placement = make_placement(
            config.scheduling,
            num_ranks=config.rollout.ep_size,
            max_running_requests=config.rollout.max_running_requests,
        )
        with Ledger.open(
            step_path(self._ledger_dir, rollout_step),
            rollout_step=rollout_step,
            weight_version=weight_version,
            num_responses=len(requests),
        ) as ledger:
            async with self._engine() as engine:
                before = await engine.counters()
                async with self._leaving(placement) as leaving:
                    result = await run_step(
                        requests,
                        engine=engine,
                        placement=placement,
                        ledger=ledger,
                        weight_version=weight_version,
                        limits=StepLimits.from_config(config),
                        on_response=scoring.submit,
                        on_progress=lambda progress: advance(progress.num_finished, _note(progress)),
                    )
                # Everybody is back by now, so every rank answers.
                after = await engine.counters()
        occupancy = measure(
            result.responses,
            started_at_s=result.started_at_s,
            finished_at_s=result.finished_at_s,
            num_ranks=config.rollout.ep_size,
            counters_before=before,
            counters_after=after,
            left_at_s={} if leaving is None else leaving.left_at_s,
        )
        return RolloutOutcome(
            requests=tuple(requests),
            result=result,
            rewards={},
            occupancy=occupancy,
            num_released=0 if leaving is None else len(leaving.left_at_s),
            num_refused=0 if leaving is None else leaving.num_refused,
        )

    @asynccontextmanager
    async def _leaving(self, placement: PlacementPolicy) -> AsyncIterator[Leaving | None]:
        """Release drained ranks inside; leaving the block in order brings them back."""
        if self._membership_folder is None:
            yield None
            return
        config = self._config.membership
        release = DrainedRelease(floor=config.floor, hold_s=config.release_after_s)
        endpoint = Endpoint.read(self._membership_folder)
        with DriverClient(endpoint, timeout_s=config.operation_timeout_s) as client:
            leaving = Leaving(client=client, release=release, placement=placement)
            task = asyncio.create_task(leaving.watch())
            try:
                yield leaving
            finally:
                task.cancel()
                await asyncio.wait({task})
            if not task.cancelled():
                task.result()
            await leaving.rejoin()

    def _engine(self) -> EngineClient:
        rollout = self._config.rollout
        return EngineClient(self._server_url, temperature=rollout.temperature, top_p=rollout.top_p)


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
