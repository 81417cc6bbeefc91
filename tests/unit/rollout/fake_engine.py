"""An engine whose draws depend on seed and absolute position only, and that fails where it is told to."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from flexfloor.rollout.engine import Chunk, EngineRefused, ResponseLost
from flexfloor.types import FinishReason, ResponseRequest


def true_token(seed: int, position: int) -> int:
    return (seed * 131 + position * 17) % 997


def true_logprob(seed: int, position: int) -> float:
    return -((seed + 3 * position) % 64) / 8


def true_draw(request: ResponseRequest, num_tokens: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens and logprobs of a response that nothing interrupts."""
    positions = range(len(request.prompt_token_ids), len(request.prompt_token_ids) + num_tokens)
    seed = request.sampling_seed
    return tuple(true_token(seed, p) for p in positions), tuple(true_logprob(seed, p) for p in positions)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What an attempt does after its first `after_chunks` chunks (`twice` and `chatter`: after the last)."""

    kind: str
    """abort | lost | refused | silent | cut | unmarked | stale | logprobs | too_many | twice | chatter"""
    after_chunks: int = 1

    @property
    def is_late(self) -> bool:
        return self.kind in ("twice", "chatter")


@dataclass(kw_only=True)
class FakeEngine:
    """`lengths`: where each response really stops, in tokens; a request's budget may end it before."""

    lengths: dict[str, int]
    prompt_tokens: dict[str, int]
    faults: dict[tuple[str, int], Fault] = field(default_factory=dict)
    """By (response_id, attempt)."""
    chunk_tokens: int = 3
    weight_version: int = 7
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    """A response with a gate sends nothing before it is set."""
    calls: list[tuple[str, int, int]] = field(default_factory=list)
    """(response_id, dp_rank, attempt) in order of arrival."""
    faults_done: set[tuple[str, int]] = field(default_factory=set)
    num_aborts: int = 0
    """Of all responses at once."""
    num_open: int = 0
    aborted: list[str] = field(default_factory=list)
    """The single responses whose abort was asked for, in order."""
    is_deaf: bool = False
    """Ignores aborts of single responses."""
    late_tokens: int = 2
    """Tokens that come with the answer to an abort."""
    _ending: set[str] = field(default_factory=set)

    async def generate_stream(
        self, request: ResponseRequest, *, dp_rank: int, attempt: int
    ) -> AsyncGenerator[Chunk, None]:
        self.calls.append((request.response_id, dp_rank, attempt))
        self.num_open += 1
        self._ending.discard(request.response_id)
        try:
            if gate := self.gates.get(request.response_id):
                await gate.wait()
            chunks, fault = self._chunks(request), self.faults.get((request.response_id, attempt))
            for number, chunk in enumerate(chunks):
                if request.response_id in self._ending:
                    yield self._abort_answer(chunk)
                    return
                if fault is not None and number == fault.after_chunks and not fault.is_late:
                    self.faults_done.add((request.response_id, attempt))
                    async for bad in self._fail(fault, chunk):
                        yield bad
                    if fault.kind in ("abort", "cut", "unmarked"):
                        return
                await asyncio.sleep(0)
                yield chunk
            if fault is not None and fault.is_late:
                self.faults_done.add((request.response_id, attempt))
                async for bad in self._fail(fault, chunks[-1]):
                    yield bad
        finally:
            self.num_open -= 1

    async def abort(self, response_id: str | None = None) -> None:
        if response_id is None:
            self.num_aborts += 1
            return
        self.aborted.append(response_id)
        if not self.is_deaf:
            self._ending.add(response_id)

    def _abort_answer(self, chunk: Chunk) -> Chunk:
        # The stop itself is never among them, see `Engine.abort`.
        is_stop = chunk.finish_reason is FinishReason.stop
        count = min(self.late_tokens, len(chunk.token_ids) - is_stop)
        return replace(
            chunk,
            token_ids=chunk.token_ids[:count],
            logprobs=chunk.logprobs[:count],
            finish_reason=FinishReason.abort,
            message="aborted",
        )

    def _chunks(self, request: ResponseRequest) -> list[Chunk]:
        name, begin = request.response_id, len(request.prompt_token_ids)
        stop = self.prompt_tokens[name] + self.lengths[name]
        end = min(stop, begin + request.max_response_tokens)
        reason = FinishReason.stop if end == stop else FinishReason.length
        starts = range(begin, end, self.chunk_tokens)
        return [
            self._chunk(request.sampling_seed, start, min(start + self.chunk_tokens, end), end, reason)
            for start in starts
        ]

    def _chunk(self, seed: int, start: int, stop: int, end: int, reason: FinishReason) -> Chunk:
        return Chunk(
            token_ids=[true_token(seed, p) for p in range(start, stop)],
            logprobs=[true_logprob(seed, p) for p in range(start, stop)],
            weight_version=self.weight_version,
            finish_reason=reason if stop == end else None,
        )

    async def _fail(self, fault: Fault, chunk: Chunk) -> AsyncGenerator[Chunk, None]:
        version, token_ids, logprobs = self.weight_version, chunk.token_ids, chunk.logprobs
        match fault.kind:
            case "abort":
                reason = FinishReason.abort
                yield Chunk(
                    token_ids=[], logprobs=[], weight_version=version, finish_reason=reason, message="paused"
                )
            case "lost":
                raise ResponseLost("connection reset")
            case "refused":
                raise EngineRefused("the prompt is too long")
            case "silent":
                await asyncio.Event().wait()
            case "stale":
                yield Chunk(token_ids=token_ids, logprobs=logprobs, weight_version=version - 1)
            case "logprobs":
                yield Chunk(token_ids=token_ids, logprobs=logprobs[1:], weight_version=version)
            case "too_many":
                yield Chunk(token_ids=token_ids * 99, logprobs=logprobs * 99, weight_version=version)
            case "unmarked":
                yield Chunk(token_ids=token_ids, logprobs=logprobs, weight_version=version)
            case "twice" | "chatter":
                end = FinishReason.stop if fault.kind == "twice" else None
                yield Chunk(token_ids=token_ids, logprobs=logprobs, weight_version=version, finish_reason=end)


class SlowEngine:
    """Passes on one response's chunks at a pace, as a busy rank does."""

    def __init__(self, engine: FakeEngine, slow_id: str, pace_s: float) -> None:
        self._engine, self._slow_id, self._pace_s = engine, slow_id, pace_s

    async def generate_stream(
        self, request: ResponseRequest, *, dp_rank: int, attempt: int
    ) -> AsyncGenerator[Chunk, None]:
        async for chunk in self._engine.generate_stream(request, dp_rank=dp_rank, attempt=attempt):
            if request.response_id == self._slow_id:
                await asyncio.sleep(self._pace_s)
            yield chunk

    async def abort(self, response_id: str | None = None) -> None:
        await self._engine.abort(response_id)
