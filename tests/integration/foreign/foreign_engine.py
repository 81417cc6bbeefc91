"""An engine that answers as SGLang and its /flexfloor routes do, and writes down what it was asked.

A prompt such as `a12` is answered with 12 tokens, 1000, 1001, ... in order, so a continued response can be
told from one that was drawn anew.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

KEY = "secret"
FIRST_TOKEN = 1000
STEP = {
    "wall_s": 2.0, "occupied_worker_s": 5.0, "static_occupied_worker_s": 8.0, "response_tokens": 40,
    "worker_iterations": 30, "static_worker_iterations": 48, "num_releases": 1, "membership_epoch": 3,
}  # fmt: skip


@dataclass
class FakeEngine:
    num_ranks: int = 4
    lost_at: dict[str, list[int]] = field(default_factory=dict)
    """Prompt -> tokens after which each of its next attempts loses its rank."""
    held: frozenset[str] = frozenset()
    """Prompts that are answered when everything is aborted."""
    has_routes: bool = True
    stays_away: tuple[int, ...] = ()
    """Ranks that do not come back at the end of a step."""
    num_timeouts: int = 0
    """Ends of a step that say 504 first."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    routed: list[int] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    is_begun: bool = False
    url: str = ""
    workers: tuple[str, ...] = ()
    """What a router lists. Default: itself."""
    num_inflight: int = 0

    def __post_init__(self) -> None:
        self._come_back()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def asked_of(self, prompt: str) -> list[dict[str, Any]]:
        return [payload for payload in self.asked if _prompt(payload["input_ids"]) == prompt]

    def app(self) -> web.Application:
        self._aborted = asyncio.Event()
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/workers", self._workers)
        if self.has_routes:
            app.router.add_get("/flexfloor/membership", self._membership)
            app.router.add_post("/flexfloor/rollout", self._rollout)
        return app

    def _come_back(self) -> None:
        self.members = [rank for rank in range(self.num_ranks) if rank not in self.stays_away]
        self.routed = list(self.members)

    async def _generate(self, request: web.Request) -> web.Response:
        payload = await request.json()
        self.asked.append(payload)
        prompt = _prompt(payload["input_ids"])
        self.num_inflight += 1
        try:
            if prompt in self.held:
                await self._aborted.wait()
                return _reply(payload, 0, {"type": "abort", "message": "aborted by the client"})
        finally:
            self.num_inflight -= 1
        num_left = int(prompt[1:]) - (len(payload["input_ids"]) - len(prompt))
        if self.lost_at.get(prompt):
            lost = {"type": "abort", "message": "flexfloor: dp rank 1 lost"}
            return _reply(payload, self.lost_at[prompt].pop(0), lost)
        budget = payload["sampling_params"]["max_new_tokens"]
        if num_left > budget:
            return _reply(payload, budget, {"type": "length", "length": budget})
        return _reply(payload, num_left, {"type": "stop", "matched": 2})

    async def _abort(self, _request: web.Request) -> web.Response:
        self._aborted.set()
        return web.json_response({})

    async def _loads(self, _request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"dp_rank": 0, "num_reqs": self.num_inflight}]})

    async def _workers(self, _request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": url} for url in self.workers or (self.url,)]})

    async def _membership(self, _request: web.Request) -> web.Response:
        states = {str(rank): "active" if rank in self.members else "parked" for rank in range(self.num_ranks)}
        view = {"membership_epoch": 1, "members": self.members, "routed": self.routed, "states": states}
        return web.json_response({**view, "floor": 1, "release": "drained"})

    async def _rollout(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"reason": "the key is not the right one"}, status=401)
        mark = await request.json()
        self.marks.append(mark)
        if (mark["action"] == "begin") == self.is_begun:
            reason = "a rollout step has begun and has not ended" if self.is_begun else "no step has begun"
            return web.json_response({"reason": reason}, status=409)
        if mark["action"] == "begin":
            self.is_begun = True
            return web.json_response({"status": "begun", "rollout_step": mark["rollout_step"]})
        if self.num_timeouts:
            self.num_timeouts -= 1
            return web.json_response({"reason": "not all ranks are back"}, status=504)
        self.is_begun = False
        self._come_back()
        return web.json_response({"status": "ended", **STEP})


@contextmanager
def serving(engine: FakeEngine) -> Iterator[FakeEngine]:
    """The engine answers on a free port of this host inside the block."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        runner = web.AppRunner(engine.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        engine.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        started.set()
        await stop.wait()
        await runner.cleanup()

    started = threading.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(timeout=30)
        yield engine
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=30)
        assert not thread.is_alive()
        loop.close()


def _prompt(ids: list[int]) -> str:
    return "".join(chr(one) for one in ids if one < FIRST_TOKEN)


def _reply(payload: dict[str, Any], num_tokens: int, finish_reason: dict[str, Any]) -> web.Response:
    done = sum(one >= FIRST_TOKEN for one in payload["input_ids"])
    tokens = range(FIRST_TOKEN + done, FIRST_TOKEN + done + num_tokens)
    meta_info = {
        "finish_reason": finish_reason,
        "weight_version": "7",
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
    }
    return web.json_response({"text": "." * num_tokens, "output_ids": list(tokens), "meta_info": meta_info})
