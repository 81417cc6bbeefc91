"""Async HTTP client of one SGLang server (one EP group).

Every wait has a deadline: connecting, each control call, and the caller's own around a stream (the client
does not know how long a response may queue). Streams are server-sent events; the server says in /server_info
whether an event repeats the tokens before it (`incremental_streaming_output` off) or holds only new ones.
"""

import asyncio
import logging
import resource
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from flexfloor.errors import DeadlineExceeded
from flexfloor.rollout.engine import Chunk, EngineRefused, ResponseLost
from flexfloor.rollout.wire import (
    counters_of,
    decode_model_info,
    decode_server_info,
    failure,
    stream_events,
    to_chunk,
    version_number,
)
from flexfloor.types import EngineCounters, ResponseRequest

logger = logging.getLogger(__name__)

_MAX_OPEN_FILES = 65_536
_POLL_S = 0.25

_LOST = (aiohttp.ClientError, ConnectionError, TimeoutError)


_encode_json = msgspec.json.Encoder().encode


class EngineClient:
    """Use as `async with EngineClient(url, ...) as engine:`.

    `temperature` and `top_p` apply to every response; with `ignore_eos` each goes on to its cap, so that a
    benchmark may choose its length. `connect_timeout_s` bounds a connect,
    `control_timeout_s` one control call.
    """

    def __init__(
        self,
        url: str,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        ignore_eos: bool = False,
        connect_timeout_s: float = 10.0,
        control_timeout_s: float = 60.0,
        api_key: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._sampling: dict[str, float | bool] = {"temperature": temperature, "top_p": top_p}
        if ignore_eos:
            self._sampling["ignore_eos"] = True
        self._stream_timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._control_timeout = aiohttp.ClientTimeout(total=control_timeout_s, sock_connect=connect_timeout_s)
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # Request ids of an earlier driver may still be running on the same server.
        self._life = uuid.uuid4().hex[:8]
        self._live_rids: dict[str, set[str]] = {}
        self._is_incremental: bool | None = None
        self._learning = asyncio.Lock()
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        _allow_open_files()
        # A connection of its own for each request: on a busy machine the server may close an idle one just
        # when it is taken up again.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._http = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def wait_ready(self, timeout_s: float, *, check_alive: Callable[[], None] = lambda: None) -> None:
        """Poll /health until the server answers 200.

        A poll makes the server generate a token, so this is for its start only. `check_alive` is called
        between polls and may raise, e.g. when the server's process has ended. Raises DeadlineExceeded after
        `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        last = "no answer yet"
        while time.monotonic() < deadline_s:
            check_alive()
            last = await self._health()
            if not last:
                return
            await asyncio.sleep(_POLL_S)
        raise DeadlineExceeded(f"{self.url} was not ready after {timeout_s:.0f} s; last: {last}")

    def generate_stream(
        self, request: ResponseRequest, *, dp_rank: int, attempt: int
    ) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate_stream`."""
        return self._stream(request, dp_rank, attempt)

    async def abort(self, response_id: str | None = None) -> None:
        """End all attempts of a response, or of every response (None)."""
        if response_id is None:
            await self._control("POST", "/abort_request", {"abort_all": True})
            return
        # The engine knows requests by their exact rid only, which differs between attempts.
        for rid in tuple(self._live_rids.get(response_id, ())):
            await self._control("POST", "/abort_request", {"rid": rid})

    async def flush_cache(self, timeout_s: float = 30.0) -> None:
        """Forget cached prefixes; waits up to `timeout_s` for the engine to be idle, then raises."""
        await self._control("POST", f"/flush_cache?timeout={timeout_s:g}", None)

    async def weight_version(self) -> int:
        """Version of the weights in the server now."""
        return version_number(decode_model_info(await self._control("GET", "/model_info")).weight_version)

    async def counters(self, exited: Mapping[int, Mapping[str, int]] | None = None) -> EngineCounters:
        """Iterations per rank since the server's start. Raises EngineRefused where the server counts none.

        `exited`: dp_rank -> last counters of ranks that the server has no more, see MembershipStatus.
        """
        info = decode_server_info(await self._control("GET", "/server_info"))
        ranks = [state.flexfloor for state in info.internal_states if state.flexfloor is not None]
        if not ranks or len(ranks) != len(info.internal_states):
            raise EngineRefused(f"{self.url}/server_info has no iteration counters: is it a flexfloor-serve?")
        # The server lists its ranks in the order in which they happened to answer.
        ranks += [counters_of(dp_rank, counts) for dp_rank, counts in (exited or {}).items()]
        ranks.sort(key=lambda rank: rank.dp_rank)
        return EngineCounters(
            num_iterations=tuple(rank.num_iterations for rank in ranks),
            num_prefill_iterations=tuple(rank.num_prefill_iterations for rank in ranks),
            num_idle_iterations=tuple(rank.num_idle_iterations for rank in ranks),
        )

    def _payload(self, request: ResponseRequest, dp_rank: int, rid: str) -> bytes:
        sampling = {
            **self._sampling,
            "max_new_tokens": request.max_response_tokens,
            "sampling_seed": request.sampling_seed,
        }
        return _encode_json(
            {
                "rid": rid,
                "input_ids": request.prompt_token_ids,
                "sampling_params": sampling,
                "routed_dp_rank": dp_rank,
                "return_logprob": True,
                "stream": True,
            }
        )

    async def _stream(
        self, request: ResponseRequest, dp_rank: int, attempt: int
    ) -> AsyncGenerator[Chunk, None]:
        # The closing "." keeps one rid from being the beginning of another: the engine's abort matches that.
        rid = f"{request.response_id}@{self._life}.{attempt}."
        rids = self._live_rids.setdefault(request.response_id, set())
        rids.add(rid)
        payload, num_seen = self._payload(request, dp_rank, rid), 0
        try:
            is_incremental = await self._streams_incrementally()
            async with self._session.post(
                f"{self.url}/generate", data=payload, timeout=self._stream_timeout
            ) as answer:
                await _check_status(answer)
                async for event in stream_events(answer.content):
                    chunk = to_chunk(event, num_seen, is_incremental)
                    num_seen += len(chunk.token_ids)
                    yield chunk
        except _LOST as error:
            raise ResponseLost(f"connection to {self.url} lost: {error!r}") from error
        finally:
            rids.discard(rid)
            if not rids:
                self._live_rids.pop(request.response_id, None)

    async def _control(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = _encode_json(body) if body is not None else None
        try:
            async with self._session.request(
                method, self.url + path, data=data, timeout=self._control_timeout
            ) as answer:
                await _check_status(answer)
                return await answer.read()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{method} {self.url}{path}: {self._control_timeout.total} s") from error
        except _LOST as error:
            raise ResponseLost(f"{method} {self.url}{path}: {error!r}") from error

    async def _health(self) -> str:
        """Empty when the server is healthy, else what it said."""
        try:
            async with self._session.get(f"{self.url}/health", timeout=self._control_timeout) as answer:
                return "" if answer.status == 200 else f"HTTP {answer.status}"
        except _LOST as error:
            return repr(error)

    async def _streams_incrementally(self) -> bool:
        async with self._learning:
            if self._is_incremental is None:
                info = decode_server_info(await self._control("GET", "/server_info"))
                self._is_incremental = info.incremental_streaming_output
                if not self._is_incremental:
                    logger.warning(
                        "event=cumulative_streaming url=%s every event repeats all tokens", self.url
                    )
        return self._is_incremental

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._http is not None, "EngineClient is used outside its `async with`"
        return self._http


async def _check_status(answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        raise failure(answer.status, (await answer.text())[:500])


def _allow_open_files() -> None:
    """A stream per response needs a file descriptor each; the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
