"""A rollout step under a plan: dispatched, its ranks released, everybody back, and what it cost.

smaller start > responses drawn while ranks leave > rejoin > counters and iteration logs read
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flexfloor.iterations import StepIterations
from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint
from flexfloor.release.use import Park, WorkerUse
from flexfloor.rollout.control import StepControl
from flexfloor.rollout.dispatcher import run_step
from flexfloor.rollout.engine_client import EngineClient
from flexfloor.rollout.iteration_log import read_step
from flexfloor.rollout.ledger import Ledger
from flexfloor.rollout.occupancy import Occupancy, measure
from flexfloor.rollout.release_control import ReleaseControl
from flexfloor.rollout.step import RolloutResult, StepLimits, StepProgress
from flexfloor.rollout.step_state import StepState
from flexfloor.rollout.step_time import StepTime
from flexfloor.schedule_record import Absence, DecisionRecord
from flexfloor.scheduling.decision import ReleasePolicy
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.place import PlacementPolicy
from flexfloor.scheduling.plan import StepPlan
from flexfloor.types import Response, ResponseRequest

_INSTANT_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """How ranks leave during the step."""

    folder: Path
    """Of the membership manager."""
    timeout_s: float
    policy: ReleasePolicy | None
    """None: whoever is in the plan's members stays to the end."""
    prediction: Callable[[str], LengthPrediction]
    """By prompt_id."""
    step_time: StepTime
    decision_interval_tokens: int
    use: WorkerUse = field(default_factory=Park)
    """What becomes of those who have left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledResult:
    result: RolloutResult
    occupancy: Occupancy
    iterations: StepIterations | None
    """None where the ranks keep no logs."""
    num_released: int
    """Ranks that were outside the group when the step ended."""
    num_refused: int
    decisions: tuple[DecisionRecord, ...] = ()
    absences: tuple[Absence, ...] = ()
    exited: tuple[int, ...] = ()
    """Ranks that this step has ended for good."""
    lost: tuple[int, ...] = ()
    """Ranks that died in it. Their responses were continued elsewhere."""

    @property
    def is_server_whole(self) -> bool:
        """A server that has ranks no more takes no weights."""
        return not self.exited and not self.lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchers:
    """What the caller wants to hear while the step runs."""

    on_response: Callable[[Response], None]
    on_progress: Callable[[StepProgress], None] = field(default=lambda progress: None)


async def run_scheduled(
    requests: Sequence[ResponseRequest],
    *,
    engine: EngineClient,
    plan: StepPlan,
    placement: PlacementPolicy,
    ledger: Ledger,
    weight_version: int,
    limits: StepLimits,
    watchers: Watchers,
    elasticity: Elasticity | None = None,
    iteration_log: Path | None = None,
) -> ScheduledResult:
    """Draw every request, in the plan's order. Raises what `run_step` and the rejoin raise."""
    by_id = {request.response_id: request for request in requests}
    control = StepControl()
    before = await engine.counters()
    async with _releasing(elasticity, placement, plan, control) as releases:
        result = await run_step(
            [by_id[name] for name in plan.order],
            engine=engine,
            placement=placement,
            ledger=ledger,
            weight_version=weight_version,
            limits=limits,
            on_response=watchers.on_response,
            on_progress=watchers.on_progress,
            control=control,
        )
    lost = tuple(sorted(placement.lost))
    # Everybody is back by now or gone for good, so every rank answers or has left its last counters. A rank
    # that died has left none: what a step with a death cost is not counted in iterations.
    after = None
    if not lost:
        after = await engine.counters(None if releases is None else releases.last_counters)
    left_at_s = {} if releases is None else releases.left_at_s
    started_at_s, finished_at_s = result.started_at_s, result.finished_at_s
    return ScheduledResult(
        result=result,
        occupancy=measure(
            result.responses,
            started_at_s=started_at_s,
            finished_at_s=finished_at_s,
            num_ranks=placement.num_ranks,
            counters_before=before,
            counters_after=after,
            left_at_s=left_at_s,
        ),
        iterations=None
        if iteration_log is None or after is None
        else read_step(iteration_log, before, after),
        num_released=len(left_at_s.keys() - placement.lost),
        num_refused=0 if releases is None else releases.num_refused,
        decisions=() if releases is None else releases.decisions(started_at_s, finished_at_s),
        absences=() if releases is None else releases.absences(started_at_s),
        exited=() if releases is None else tuple(sorted(releases.exited)),
        lost=lost,
    )


def replayed(responses: Sequence[Response], state: StepState, *, num_ranks: int) -> ScheduledResult:
    """A step that is on record whole, as if it had been drawn; what it cost besides is not in its ledger."""
    started_at_s = min(response.started_at_s for response in responses)
    finished_at_s = max(started_at_s + _INSTANT_S, *(response.finished_at_s for response in responses))
    return ScheduledResult(
        result=RolloutResult(
            responses=tuple(responses),
            started_at_s=started_at_s,
            finished_at_s=finished_at_s,
            num_resumed=len(responses),
            num_retries=state.num_retries,
            num_duplicates=state.num_duplicates,
            num_late=state.num_late,
            num_moves=state.num_moves,
        ),
        occupancy=measure(
            responses, started_at_s=started_at_s, finished_at_s=finished_at_s, num_ranks=num_ranks
        ),
        iterations=None,
        num_released=0,
        num_refused=0,
    )


@asynccontextmanager
async def _releasing(
    elasticity: Elasticity | None, placement: PlacementPolicy, plan: StepPlan, step: StepControl
) -> AsyncIterator[ReleaseControl | None]:
    """Ranks leave inside the block; leaving it in order brings them back."""
    if elasticity is None:
        yield None
        return
    with DriverClient(Endpoint.read(elasticity.folder), timeout_s=elasticity.timeout_s) as client:
        releases = ReleaseControl(
            client=client,
            policy=elasticity.policy,
            placement=placement,
            prediction=elasticity.prediction,
            step_time=elasticity.step_time,
            decision_interval_tokens=elasticity.decision_interval_tokens,
            use=elasticity.use,
        )
        status = await asyncio.to_thread(client.status)
        releases.take_lost_of(status)
        elasticity.use.begin(status.nodes)
        try:
            async with _watched(releases, plan, step):
                yield releases
            await releases.rejoin()
        finally:
            # Not in a thread: it must also run where the step was cancelled.
            elasticity.use.finish()


@asynccontextmanager
async def _watched(releases: ReleaseControl, plan: StepPlan, step: StepControl) -> AsyncIterator[None]:
    await asyncio.to_thread(releases.start_with, plan.members)
    task = asyncio.create_task(releases.watch(step))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()
