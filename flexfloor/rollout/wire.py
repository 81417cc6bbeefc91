"""The parts of SGLang's HTTP answers that are read: structs, stream events, and what an error means.

msgspec skips undecoded whatever a struct does not name, which is most of every event.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import msgspec

from flexfloor.errors import StaleWeightsError
from flexfloor.rollout.engine import Chunk, EngineRefused, ResponseLost
from flexfloor.types import FinishReason


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _VersionSpan(msgspec.Struct):
    version: str


class _MetaInfo(msgspec.Struct):
    finish_reason: _Finish | None
    weight_version: str
    completion_tokens: int = 0
    """Tokens of the request so far, this event's included."""
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    weight_versions: list[_VersionSpan] | None = None


class _StreamError(msgspec.Struct):
    message: str
    code: int | None = None


class StreamEvent(msgspec.Struct):
    """The part of a stream event that is read; everything else is skipped undecoded."""

    output_ids: list[int] = []
    meta_info: _MetaInfo | None = None
    error: _StreamError | None = None


class _RankCounters(msgspec.Struct):
    dp_rank: int
    num_iterations: int
    num_prefill_iterations: int
    num_idle_iterations: int


def counters_of(dp_rank: int, counts: Mapping[str, int]) -> _RankCounters:
    """What a rank that is gone would have answered. Raises ValueError for counters of another kind."""
    return msgspec.convert({"dp_rank": dp_rank, **counts}, _RankCounters)


class _RankState(msgspec.Struct):
    flexfloor: _RankCounters | None = None


class _ServerInfo(msgspec.Struct):
    internal_states: list[_RankState]
    incremental_streaming_output: bool = False


class _ModelInfo(msgspec.Struct):
    weight_version: str


_decode_event = msgspec.json.Decoder(StreamEvent).decode
decode_server_info = msgspec.json.Decoder(_ServerInfo).decode
decode_model_info = msgspec.json.Decoder(_ModelInfo).decode


class ByteSource(Protocol):
    """The body of an answer, e.g. an aiohttp.StreamReader."""

    async def readany(self) -> bytes:
        """What has arrived, at least one byte; empty at the end."""
        ...


async def stream_events(content: ByteSource) -> AsyncIterator[StreamEvent]:
    """Server-sent events up to [DONE]; a last event that was cut off is not among them."""
    pending = b""
    while data := await content.readany():
        *whole, pending = (pending + data).split(b"\n\n")
        for line in whole:
            body = line.removeprefix(b"data: ")
            if body == b"[DONE]":
                return
            yield _decode_or_lost(body)


def _decode_or_lost(body: bytes) -> StreamEvent:
    try:
        return _decode_event(body)
    except msgspec.DecodeError as error:
        raise ResponseLost(f"the engine sent what is not a stream event: {error}: {body[:200]!r}") from error


def to_chunk(event: StreamEvent, num_seen: int, is_incremental: bool) -> Chunk:
    """The event's new tokens, after `num_seen` tokens of the same attempt."""
    if event.error is not None:
        raise failure(event.error.code, event.error.message)
    meta = event.meta_info
    if meta is None:
        raise ResponseLost("the engine sent an event without meta_info")
    finish = meta.finish_reason
    if finish is not None and finish.type == "abort" and finish.status_code is not None:
        raise failure(finish.status_code, finish.message or "")
    token_ids, entries = event.output_ids, meta.output_token_logprobs
    if not is_incremental:
        token_ids, entries = token_ids[num_seen:], entries[num_seen:]
    if finish is not None and finish.type == "abort":
        # SGLang ends an aborted request before it looks whether its last token stops it, and repeats the last
        # one of a queued request. What is left out here is drawn again.
        is_repeated = meta.completion_tokens != num_seen + len(token_ids)
        num_sure = 0 if is_repeated else max(0, len(token_ids) - 1)
        token_ids, entries = token_ids[:num_sure], entries[:num_sure]
    return Chunk(
        token_ids=token_ids,
        logprobs=_logprobs(token_ids, entries),
        weight_version=_version(meta),
        finish_reason=None if finish is None else FinishReason(finish.type),
        message=(finish.message or "") if finish else "",
    )


def _logprobs(token_ids: list[int], entries: list[tuple[float | None, int, str | None]]) -> list[float]:
    logprobs: list[float] = []
    for token_id, (logprob, of_token_id, _) in zip(token_ids, entries, strict=False):
        # JSON has no NaN: the engine writes null.
        if of_token_id != token_id or logprob is None:
            raise ResponseLost(f"token {token_id} came with logprob {logprob} of token {of_token_id}")
        logprobs.append(logprob)
    if len(entries) != len(token_ids):
        raise ResponseLost(f"the engine sent {len(token_ids)} tokens and {len(entries)} logprobs")
    return logprobs


def _version(meta: _MetaInfo) -> int:
    spans = {span.version for span in meta.weight_versions or ()}
    if len(spans) > 1:
        raise StaleWeightsError(f"weights changed within a response: versions {sorted(spans)}")
    return version_number(spans.pop() if spans else meta.weight_version)


def version_number(version: str) -> int:
    try:
        return int(version)
    except ValueError:
        raise StaleWeightsError(
            f"the server's weight_version is {version!r}, not a number; start it with --weight-version N"
        ) from None


def failure(status: int | None, message: str) -> ResponseLost | EngineRefused:
    """4xx is about the request, but for 408 and 429; everything else may go well next time."""
    if status is not None and 400 <= status < 500 and status not in (408, 429):
        return EngineRefused(f"the engine refused the request ({status}): {message}")
    return ResponseLost(f"the engine failed ({status}): {message}")
