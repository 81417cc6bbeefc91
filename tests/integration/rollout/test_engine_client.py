"""The HTTP client against a server that the test scripts: losses, refusals, deadlines, many streams."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from flexfloor.errors import ChildProcessError, DeadlineExceeded, StaleWeightsError
from flexfloor.rollout.engine import Chunk, EngineRefused, ResponseLost
from flexfloor.rollout.engine_client import EngineClient
from flexfloor.rollout.ports import free_base_port
from flexfloor.types import EngineCounters, FinishReason, ResponseRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_request(name: str = "0/p/0") -> ResponseRequest:
    return ResponseRequest(
        response_id=name,
        rollout_step=0,
        prompt_id="p",
        sample_index=0,
        prompt_token_ids=(3, 4),
        max_response_tokens=9,
        sampling_seed=17,
    )


def event(token_ids: list[int], total: int, finish: str | None = None) -> bytes:
    meta_info = {
        "finish_reason": finish and {"type": finish},
        "weight_version": "3",
        "completion_tokens": total,
        "output_token_logprobs": [[-1.0, t, None] for t in token_ids],
    }
    return b"data: " + json.dumps({"output_ids": token_ids, "meta_info": meta_info}).encode() + b"\n\n"


class Script:
    """A server whose /generate is the test's; the rest answers like SGLang and records what came."""

    def __init__(self, generate: Handler, *, is_incremental: bool = True) -> None:
        self.generate = generate
        self.is_incremental = is_incremental
        self.bodies: list[dict[str, Any]] = []
        self.aborts: list[dict[str, Any]] = []

    async def on_generate(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        return await self.generate(request)

    async def on_abort(self, request: web.Request) -> web.Response:
        self.aborts.append(await request.json())
        return web.Response()

    async def on_server_info(self, _: web.Request) -> web.Response:
        ranks = [(2, 30, 4, 20), (0, 30, 4, 1), (1, 30, 4, 7)]
        names = ("dp_rank", "num_iterations", "num_prefill_iterations", "num_idle_iterations")
        states = [{"flexfloor": dict(zip(names, rank, strict=True)), "world_size": 3} for rank in ranks]
        return web.json_response(
            {"internal_states": states, "incremental_streaming_output": self.is_incremental}
        )

    async def on_model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": "default"})

    @asynccontextmanager
    async def client(self, **kwargs: Any) -> AsyncIterator[EngineClient]:
        app = web.Application()
        app.router.add_post("/generate", self.on_generate)
        app.router.add_post("/abort_request", self.on_abort)
        app.router.add_get("/server_info", self.on_server_info)
        app.router.add_get("/model_info", self.on_model_info)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        port = free_base_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            async with EngineClient(f"http://127.0.0.1:{port}", **kwargs) as client:
                yield client
        finally:
            await runner.cleanup()


def streaming(*pieces: bytes, is_cut: bool = False) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for piece in pieces:
            await answer.write(piece)
        if is_cut:
            assert request.transport is not None
            request.transport.abort()
        return answer

    return handle


def draw(script: Script, **kwargs: Any) -> list[Chunk]:
    async def go() -> list[Chunk]:
        async with script.client(**kwargs) as client:
            return [chunk async for chunk in client.generate_stream(make_request(), dp_rank=2, attempt=3)]

    return asyncio.run(asyncio.wait_for(go(), timeout=20))


GOOD = (event([5], 1), event([6, 7], 3), event([2], 4, "stop"), b"data: [DONE]\n\n")


def test_a_request_says_all_that_the_engine_needs() -> None:
    script = Script(streaming(*GOOD))
    chunks = draw(script, temperature=0.7)
    assert [chunk.token_ids for chunk in chunks] == [[5], [6, 7], [2]]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, FinishReason.stop]
    (body,) = script.bodies
    rid = body.pop("rid")
    assert rid.startswith("0/p/0@")
    assert rid.endswith(".3.")
    assert body == {
        "input_ids": [3, 4],
        "sampling_params": {"temperature": 0.7, "top_p": 1.0, "max_new_tokens": 9, "sampling_seed": 17},
        "routed_dp_rank": 2,
        "return_logprob": True,
        "stream": True,
    }


def test_a_benchmark_may_have_every_response_go_on_to_its_cap() -> None:
    script = Script(streaming(*GOOD))
    draw(script, ignore_eos=True)
    assert script.bodies[0]["sampling_params"]["ignore_eos"] is True


def test_a_server_that_repeats_tokens_is_understood() -> None:
    cumulative = (event([5], 1), event([5, 6, 7], 3), event([5, 6, 7, 2], 4, "stop"), b"data: [DONE]\n\n")
    chunks = draw(Script(streaming(*cumulative), is_incremental=False))
    assert [chunk.token_ids for chunk in chunks] == [[5], [6, 7], [2]]


def test_a_connection_cut_in_mid_event_is_a_lost_response() -> None:
    with pytest.raises(ResponseLost, match=r"connection to .* lost"):
        draw(Script(streaming(GOOD[0], GOOD[1][:20], is_cut=True)))


def test_nobody_listening_is_a_lost_response() -> None:
    async def go() -> None:
        async with EngineClient(f"http://127.0.0.1:{free_base_port()}") as client:
            async for _ in client.generate_stream(make_request(), dp_rank=0, attempt=1):
                pass

    with pytest.raises(ResponseLost):
        asyncio.run(go())


@pytest.mark.parametrize(("status", "kind"), [(400, EngineRefused), (503, ResponseLost)])
def test_statuses_are_refusals_or_losses(status: int, kind: type[Exception]) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "too long"}}, status=status)

    with pytest.raises(kind, match=rf"\({status}\).*too long"):
        draw(Script(refuse))


def test_many_streams_run_at_once() -> None:
    """None ends before all have begun: a limit on connections would stop this test at its deadline."""
    num_streams, begun = 600, asyncio.Event()
    script = Script(streaming())

    async def hold(request: web.Request) -> web.StreamResponse:
        if len(script.bodies) == num_streams:
            begun.set()
        await begun.wait()
        return await streaming(*GOOD)(request)

    script.generate = hold

    async def one(client: EngineClient, number: int) -> int:
        request = make_request(f"0/p/{number}")
        chunks = [chunk async for chunk in client.generate_stream(request, dp_rank=0, attempt=1)]
        return sum(len(chunk.token_ids) for chunk in chunks)

    async def go() -> list[int]:
        async with script.client() as client:
            return await asyncio.gather(*(one(client, number) for number in range(num_streams)))

    assert asyncio.run(asyncio.wait_for(go(), timeout=60)) == [4] * num_streams
    order = [int(body["rid"].split("@")[0].rsplit("/", 1)[1]) for body in script.bodies]
    assert order == list(range(num_streams))


def test_abort_names_the_live_attempt_exactly() -> None:
    script = Script(streaming(GOOD[0], GOOD[2]))

    async def go() -> None:
        async with script.client() as client:
            async for chunk in client.generate_stream(make_request(), dp_rank=0, attempt=1):
                if chunk.finish_reason is None:
                    await client.abort("0/p/0")
            await client.abort("0/p/0")  # nothing of it runs any more
            await client.abort()

    asyncio.run(go())
    assert script.aborts == [{"rid": script.bodies[0]["rid"]}, {"abort_all": True}]


def test_counters_are_in_rank_order_and_versions_are_numbers() -> None:
    async def go() -> EngineCounters:
        async with Script(streaming()).client() as client:
            with pytest.raises(StaleWeightsError, match="'default'"):
                await client.weight_version()
            return await client.counters()

    assert asyncio.run(go()) == EngineCounters(
        num_iterations=(30, 30, 30), num_prefill_iterations=(4, 4, 4), num_idle_iterations=(1, 7, 20)
    )


def test_a_control_call_has_a_deadline() -> None:
    async def never(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    script = Script(streaming())
    script.on_model_info = never  # type: ignore[method-assign]

    async def go() -> None:
        async with script.client(control_timeout_s=0.1) as client:
            await client.weight_version()

    with pytest.raises(DeadlineExceeded, match=r"GET http://127.0.0.1:\d+/model_info: 0.1 s"):
        asyncio.run(asyncio.wait_for(go(), timeout=20))


def test_waiting_ends_at_its_deadline_or_when_the_process_does() -> None:
    async def go(timeout_s: float, check_alive: Callable[[], None]) -> None:
        async with EngineClient(f"http://127.0.0.1:{free_base_port()}") as client:
            await client.wait_ready(timeout_s, check_alive=check_alive)

    with pytest.raises(DeadlineExceeded, match=r"was not ready after 0 s; last: ClientConnector"):
        asyncio.run(go(0.3, lambda: None))

    def ended() -> None:
        raise ChildProcessError("exit code 1")

    with pytest.raises(ChildProcessError, match="exit code 1"):
        asyncio.run(go(60.0, ended))
