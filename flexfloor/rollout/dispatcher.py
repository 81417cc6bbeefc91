"""Run one rollout step: every response once, to its end, on the rank that the placement policy names.

All tokens go into the ledger as they arrive. An attempt that is lost (engine abort, connection, silence, an
answer that makes no sense) is continued from prompt + tokens so far with the remaining budget and the same
seed; the logprobs so far are kept. A deterministic engine mixes the token's position into the seed, so that a
continued draw is the draw that was interrupted.

A rank that the server reports lost gets nothing more, and what was on it is continued elsewhere without
counting against `max_attempts`: each rank dies once at most.

Requests are sent in their order; one that the policy holds back, or that is to be continued, goes first as
soon as there is a place. A controller may order that a response goes on on another rank, see `control`: that
is no loss. A step whose ledger already holds responses goes on where that ledger ends.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from flexfloor.errors import FlexfloorError, StaleWeightsError
from flexfloor.records import Aborted, Finished, Progress, Submitted, moved_reason
from flexfloor.rollout.attempt import Attempt
from flexfloor.rollout.control import StepControl, UnfinishedResponse
from flexfloor.rollout.engine import AttemptsExhausted, Chunk, Engine, RankGone, ResponseLost, gone_rank
from flexfloor.rollout.ledger import Ledger
from flexfloor.rollout.silence import SilenceWatch
from flexfloor.rollout.step import ProgressReporter, RolloutResult, StepLimits, StepProgress
from flexfloor.rollout.step_checks import check_ledger, refuse_strangers, refuse_twins
from flexfloor.rollout.step_state import ResponseState
from flexfloor.scheduling.place import PlacementPolicy
from flexfloor.types import FinishReason, Response, ResponseRequest

logger = logging.getLogger(__name__)

_DRAIN_TIMEOUT_S = 5.0
_CANCEL_TIMEOUT_S = 5.0


def _ignore(_: object) -> None:
    pass


async def run_step(
    requests: Sequence[ResponseRequest],
    *,
    engine: Engine,
    placement: PlacementPolicy,
    ledger: Ledger,
    weight_version: int,
    limits: StepLimits,
    on_response: Callable[[Response], None] = _ignore,
    on_progress: Callable[[StepProgress], None] = _ignore,
    progress_interval_s: float = 0.5,
    control: StepControl | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> RolloutResult:
    """Draw every request's response; calls `on_response` as each finishes, and at once for those that an
    earlier run of the step left finished in the ledger.

    Raises AttemptsExhausted, EngineRefused, StaleWeightsError, or what a callback raised; the other responses
    are then given up and their tokens so far are in the ledger. Cancelling aborts the engine's requests.
    """
    refuse_twins(requests)
    step = _Step(
        requests=requests,
        engine=engine,
        placement=placement,
        ledger=ledger,
        weight_version=weight_version,
        limits=limits,
        on_response=on_response,
        report=ProgressReporter(on_progress, progress_interval_s, clock),
        clock=clock,
    )
    if control is None:
        return await step.run()
    control.attach(step.unfinished, step.move)
    try:
        return await step.run()
    finally:
        control.detach()


@dataclass(kw_only=True, eq=False)
class _Step:
    requests: Sequence[ResponseRequest]
    engine: Engine
    placement: PlacementPolicy
    ledger: Ledger
    weight_version: int
    limits: StepLimits
    on_response: Callable[[Response], None]
    report: ProgressReporter
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        check_ledger(self.ledger, self.weight_version)
        self._caps = {request.response_id: self.limits.cap_tokens(request) for request in self.requests}
        self._queue: deque[ResponseRequest] = deque()
        self._tasks: asyncio.TaskGroup | None = None
        self._rank_heard_at_s = [0.0] * self.placement.num_ranks
        self._losses: dict[str, list[str]] = {}
        self._unfinished: dict[str, ResponseRequest] = {}
        self._attempts: dict[str, Attempt] = {}

    async def run(self) -> RolloutResult:
        started_at_s, num_resumed = self.clock(), self._resume()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._send_waiting()
        except BaseExceptionGroup as group:
            # The first failure cancelled the others, so it is the one to tell.
            raise group.exceptions[0] from group
        finally:
            await self._abort_running()
        self.report(self._progress, is_last=True)
        state = self.ledger.state
        return RolloutResult(
            responses=tuple(state.response(request.response_id) for request in self.requests),
            started_at_s=started_at_s,
            finished_at_s=self.clock(),
            num_resumed=num_resumed,
            num_retries=state.num_retries,
            num_duplicates=state.num_duplicates,
            num_late=state.num_late,
            num_moves=state.num_moves,
        )

    def unfinished(self) -> list[UnfinishedResponse]:
        return [self._view(request) for request in self._unfinished.values()]

    def move(self, response_id: str, dp_rank: int) -> bool:
        if response_id not in self._caps:
            raise ValueError(f"response {response_id} is not one of this step")
        if not 0 <= dp_rank < self.placement.num_ranks:
            raise ValueError(f"dp_rank={dp_rank}: the group has {self.placement.num_ranks} ranks")
        attempt = self._attempts.get(response_id)
        is_there = attempt is not None and attempt.moves_to is None and attempt.dp_rank == dp_rank
        if response_id not in self._unfinished or is_there:
            return False
        self.placement.move(response_id, dp_rank)
        if attempt is not None:
            if attempt.moves_to is None:
                assert self._tasks is not None, "an attempt runs inside the task group only"
                self._tasks.create_task(attempt.abort(self.engine))
            attempt.moves_to = dp_rank
        return True

    def _view(self, request: ResponseRequest) -> UnfinishedResponse:
        name = request.response_id
        attempt, known = self._attempts.get(name), self.ledger.state.responses.get(name)
        return UnfinishedResponse(
            response_id=name,
            prompt_id=request.prompt_id,
            dp_rank=None if attempt is None else attempt.dp_rank,
            moves_to=None if attempt is None else attempt.moves_to,
            prompt_tokens=len(request.prompt_token_ids),
            generated_tokens=0 if known is None else len(known.token_ids),
            cap_tokens=self._caps[name],
            has_begun=attempt is not None and attempt.has_begun,
        )

    def _resume(self) -> int:
        """Hand out what the ledger holds finished, queue the rest; returns the number handed out."""
        num_resumed = 0
        refuse_strangers(self.ledger, self.requests)
        for request in self.requests:
            known = self.ledger.state.responses.get(request.response_id)
            if known is not None and known.finished is not None:
                self.on_response(self.ledger.state.response(request.response_id))
                num_resumed += 1
                continue
            if known is not None and known.is_running:
                self._append_aborted(request.response_id, known, "the run was interrupted")
            self._queue.append(request)
            self._unfinished[request.response_id] = request
        return num_resumed

    def _send_waiting(self) -> None:
        assert self._tasks is not None, "runs inside the task group only"
        while self._queue:
            dp_rank = self.placement.submit(self._queue[0].response_id)
            if dp_rank is None:
                assert any(self.placement.inflight), "the policy holds responses back from an empty group"
                return
            self._tasks.create_task(self._draw(self._queue.popleft(), dp_rank))

    async def _draw(self, request: ResponseRequest, dp_rank: int) -> None:
        """One attempt on a rank; a lost or moved one goes back to the head of the queue."""
        attempt = self._submit(request, dp_rank)
        self._attempts[request.response_id] = attempt
        try:
            reason = await self._run_attempt(attempt)
        finally:
            del self._attempts[request.response_id]
            attempt.ended.set()
            self.placement.finish(request.response_id)
        if reason and attempt.is_moved:
            self._queue.appendleft(request)
        elif reason and attempt.is_rank_gone:
            logger.warning("event=rank_lost response_id=%s dp_rank=%d", request.response_id, dp_rank)
            self._queue.appendleft(request)
        elif reason:
            num_losses = self._count_loss(attempt, reason)
            self._send_waiting()
            if not attempt.has_begun:
                # Nothing came at all: the engine may need a moment, where an abort in mid-response does not.
                await asyncio.sleep(self.limits.retry_backoff_s * 2 ** (num_losses - 1))
            self._queue.appendleft(request)
        self._send_waiting()

    def _count_loss(self, attempt: Attempt, reason: str) -> int:
        name, dp_rank = attempt.request.response_id, attempt.dp_rank
        logger.warning("event=attempt_lost response_id=%s dp_rank=%d reason=%r", name, dp_rank, reason)
        losses = self._losses.setdefault(name, [])
        losses.append(f"dp_rank {dp_rank}: {reason}")
        if len(losses) >= self.limits.max_attempts:
            raise AttemptsExhausted(f"response {name} was lost {len(losses)} times: " + "; ".join(losses))
        return len(losses)

    def _submit(self, request: ResponseRequest, dp_rank: int) -> Attempt:
        known = self.ledger.state.responses.get(request.response_id)
        number = known.attempt + 1 if known else 1
        self.ledger.append(
            Submitted(
                request.response_id,
                number,
                dp_rank,
                self.clock(),
                request.prompt_id,
                request.sample_index,
                self._caps[request.response_id],
                request.sampling_seed,
                () if known else request.prompt_token_ids,
            )
        )
        known = self.ledger.state.responses[request.response_id]
        return Attempt(request=request, dp_rank=dp_rank, number=number, known=known)

    async def _run_attempt(self, attempt: Attempt) -> str:
        """Why the response must be continued; empty when it finished."""
        if attempt.known.remaining_tokens == 0:
            self._finish(attempt, FinishReason.length)
            return ""
        try:
            await self._stream(attempt)
            reason = "the stream ended without a finish reason"
        except TimeoutError:
            reason = f"silent for {self.limits.response_timeout_s:g} s"
        except RankGone as error:
            reason = str(error)
            self._lose(attempt, error.dp_rank)
        except ResponseLost as error:
            reason = str(error)
        if attempt.is_moved and attempt.known.remaining_tokens == 0:
            self._finish(attempt, FinishReason.length)
        if attempt.known.finished is not None:
            return ""
        self._append_aborted(attempt.request.response_id, attempt.known, reason)
        return reason

    def _lose(self, attempt: Attempt, dp_rank: int) -> None:
        attempt.is_rank_gone = True
        if 0 <= dp_rank < self.placement.num_ranks:
            self.placement.lose(dp_rank)

    async def _stream(self, attempt: Attempt) -> None:
        request, known = attempt.request, attempt.known
        rest = request
        if known.token_ids or known.remaining_tokens != request.max_response_tokens:
            rest = replace(
                request,
                prompt_token_ids=(*request.prompt_token_ids, *known.token_ids),
                max_response_tokens=known.remaining_tokens,
            )
        async with asyncio.timeout(None) as scope:
            attempt.watch = SilenceWatch(
                scope, self.limits.response_timeout_s, lambda: self._rank_heard_at_s[attempt.dp_rank]
            )
            with attempt.watch:
                stream = self.engine.generate_stream(rest, dp_rank=attempt.dp_rank, attempt=attempt.number)
                async with aclosing(stream):
                    async for chunk in stream:
                        self._take(attempt, chunk)

    def _take(self, attempt: Attempt, chunk: Chunk) -> None:
        assert attempt.watch is not None, "set before the stream opens"
        self._rank_heard_at_s[attempt.dp_rank] = attempt.watch.heard()
        if attempt.known.finished is None:
            self._check(attempt, chunk)
        if chunk.token_ids:
            self.ledger.append(self._progress_record(attempt, chunk))
        dead = gone_rank(chunk)
        if dead is not None:
            raise RankGone(dead, chunk.message)
        if chunk.finish_reason is FinishReason.abort:
            if attempt.moves_to is not None:
                attempt.is_moved = True
                raise ResponseLost(moved_reason(attempt.moves_to))
            raise ResponseLost(f"aborted by the engine: {chunk.message}")
        if chunk.finish_reason is not None:
            self._finish(attempt, chunk.finish_reason)
            attempt.watch.limit(_DRAIN_TIMEOUT_S)
        self.report(self._progress)

    def _check(self, attempt: Attempt, chunk: Chunk) -> None:
        if chunk.weight_version != self.weight_version:
            raise StaleWeightsError(
                f"response {attempt.request.response_id} comes from weight_version {chunk.weight_version}; "
                f"the rollout step runs on {self.weight_version}"
            )
        if len(chunk.token_ids) != len(chunk.logprobs):
            raise ResponseLost(f"{len(chunk.token_ids)} tokens came with {len(chunk.logprobs)} logprobs")
        if len(chunk.token_ids) > attempt.known.remaining_tokens:
            raise ResponseLost(
                f"{len(chunk.token_ids)} tokens came where {attempt.known.remaining_tokens} were asked for"
            )

    def _progress_record(self, attempt: Attempt, chunk: Chunk) -> Progress:
        return Progress(
            attempt.request.response_id,
            attempt.number,
            len(attempt.known.token_ids),
            chunk.token_ids,
            chunk.logprobs,
        )

    def _finish(self, attempt: Attempt, reason: FinishReason) -> None:
        name, known = attempt.request.response_id, attempt.known
        num_tokens = len(known.token_ids)
        record = Finished(
            response_id=name,
            attempt=attempt.number,
            dp_rank=attempt.dp_rank,
            weight_version=self.weight_version,
            finish_reason=reason,
            num_tokens=num_tokens,
            # Short of our cap means that the engine ran out of KV room: then that was the cap.
            cap_tokens=num_tokens if reason is FinishReason.length else known.first.cap_tokens,
            started_at_s=known.first.at_s,
            finished_at_s=self.clock(),
        )
        if self.ledger.append(record):
            del self._unfinished[name]
            self.on_response(self.ledger.state.response(name))

    async def _abort_running(self) -> None:
        """After a failure or a cancel: nothing of this step may go on in the engine."""
        running = {
            request.response_id: known
            for request in self.requests
            if (known := self.ledger.state.responses.get(request.response_id)) and known.is_running
        }
        if not running:
            return
        # A full disk or the engine may be what failed; the error on its way up matters more than this one. A
        # record that is missing here is made up for when the step is resumed.
        with contextlib.suppress(OSError):
            for name, known in running.items():
                self._append_aborted(name, known, "the step was given up")
        with contextlib.suppress(FlexfloorError, TimeoutError):
            async with asyncio.timeout(_CANCEL_TIMEOUT_S):
                await self.engine.abort()

    def _append_aborted(self, name: str, known: ResponseState, reason: str) -> None:
        num_tokens = len(known.token_ids)
        self.ledger.append(Aborted(name, known.attempt, known.dp_rank, self.clock(), num_tokens, reason))

    def _progress(self) -> StepProgress:
        state = self.ledger.state
        return StepProgress(
            num_responses=len(self.requests),
            num_finished=state.num_finished,
            num_tokens=state.num_tokens,
            inflight=self.placement.inflight,
        )
