"""The routes under /flexfloor/: requests in, the server side asked, JSON out.

Each is added with `app.add_api_route`: SGLang cannot tell the level of a route of an included router.
"""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from flexfloor.membership.errors import MembershipFailed
from flexfloor.membership.status import OperationResult
from sglang_patches.http.auth import PREFIX, refusal
from sglang_patches.http.bodies import MAX_BODY_BYTES, BadBody, RejoinBody, ReleaseBody, RolloutBody, decode
from sglang_patches.http.events import MAX_STREAMS
from sglang_patches.http.view import choose_leavers, choose_returners

if TYPE_CHECKING:
    from sglang_patches.server_side import ServerSide

TAKEN_UP_TIMEOUT_S = 30.0
"""The manager looks at a request in milliseconds."""

Handler = Callable[["ServerSide", Request], Awaitable[Response]]
Kind = TypeVar("Kind", ReleaseBody, RejoinBody, RolloutBody)


def install(app: Any, side: "ServerSide") -> None:
    """Add the routes to SGLang's app, before it serves. Raises ValueError where its paths would be ours."""
    for method, path, handler, changes in (
        ("GET", "membership", membership, False),
        ("GET", "events", events, False),
        ("GET", "operations/{operation_id}", operation, False),
        ("POST", "release", release, True),
        ("POST", "rejoin", rejoin, True),
        ("POST", "rollout", rollout, True),
    ):
        endpoint = _guarded(handler, side, changes=changes)
        app.add_api_route(PREFIX + path, endpoint, methods=[method], name=f"flexfloor_{handler.__name__}")


def _guarded(handler: Handler, side: "ServerSide", *, changes: bool) -> Callable[..., Awaitable[Response]]:
    @wraps(handler)
    async def endpoint(request: Request) -> Response:
        refused = refusal(request.headers.get("authorization"), side.keys(), changes=changes)
        if refused is not None:
            return _reply(refused.status, reason=refused.reason)
        try:
            return await handler(side, request)
        except BadBody as error:
            return _reply(422, reason=str(error))
        except MembershipFailed as error:
            return _reply(503, reason=str(error))
        except TimeoutError:
            return _reply(504, reason="the membership manager does not answer. Fix: see the server's log")

    # FastAPI reads the signature to know what to pass, and would see the handler's through `wraps`.
    del endpoint.__wrapped__
    endpoint.__annotations__ = {"request": Request, "return": Response}
    return endpoint


async def membership(side: "ServerSide", _request: Request) -> Response:
    """The group now: epoch, members, states, floor, experts per rank, last switches."""
    return _reply(200, **side.membership_json())


async def events(side: "ServerSide", request: Request) -> Response:
    """Membership events as server-sent events; `Last-Event-ID` replays those after it."""
    shown = request.headers.get("last-event-id")
    if shown is not None and not (shown.isascii() and shown.isdecimal() and len(shown) <= 18):
        return _reply(422, reason="Last-Event-ID is not the number of an event. Fix: leave it out")
    if side.events.num_streams >= MAX_STREAMS:
        return _reply(429, reason=f"{MAX_STREAMS} streams are open. Fix: close one")
    last_id = side.events.last_id if shown is None else int(shown)
    # Numbers above the last one are of an earlier run of the server.
    last_id = last_id if last_id <= side.events.last_id else 0
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    frames = side.events.stream(last_id, side.is_stopping)
    return StreamingResponse(frames, media_type="text/event-stream", headers=headers)


async def operation(side: "ServerSide", request: Request) -> Response:
    """What became of a release or a rejoin."""
    operation_id: str = request.path_params["operation_id"]
    future = side.operations.known(operation_id)
    if future is None:
        reason = "no such operation is known: it was never asked for, or is long over"
        return _reply(404, operation_id=operation_id, reason=reason)
    return await _answer(operation_id, future, wait_s=0.0)


async def release(side: "ServerSide", request: Request) -> Response:
    """Let ranks finish what they have and leave the group."""
    body = await _body(request, ReleaseBody)
    asked = f"release ep_ranks={body.ep_ranks} num_ranks={body.num_ranks} leave={body.leave}"

    def start(operation_id: str) -> "Future[OperationResult]":
        ep_ranks = body.ep_ranks or choose_leavers(body.num_ranks or 0, side.group.status(), side.load())
        return side.group.release(tuple(ep_ranks), body.leave, operation_id)

    return await _operate(side, body.operation_id, asked, start, body.wait_s)


async def rejoin(side: "ServerSide", request: Request) -> Response:
    """Bring ranks back."""
    body = await _body(request, RejoinBody)
    asked = f"rejoin ep_ranks={body.ep_ranks} num_ranks={body.num_ranks}"

    def start(operation_id: str) -> "Future[OperationResult]":
        ep_ranks = tuple(body.ep_ranks or ())
        if body.num_ranks is not None:
            ep_ranks = choose_returners(body.num_ranks, side.group.status())
        return side.group.rejoin(ep_ranks, operation_id)

    return await _operate(side, body.operation_id, asked, start, body.wait_s)


async def rollout(side: "ServerSide", request: Request) -> Response:
    """Mark the begin or the end of a rollout step."""
    body = await _body(request, RolloutBody)
    do = side.rollouts.begin if body.action == "begin" else side.rollouts.end
    status, payload = await do(body.rollout_step)
    return _reply(status, **payload)


async def _operate(
    side: "ServerSide",
    named: str | None,
    asked: str,
    start: Callable[[str], "Future[OperationResult]"],
    wait_s: float,
) -> Response:
    operation_id = named or uuid.uuid4().hex
    if reason := side.operations.conflict(operation_id, asked):
        return _refused(operation_id, reason)
    future = side.operations.known(operation_id)
    if future is None:
        try:
            future = start(operation_id)
        except ValueError as error:
            return _refused(operation_id, str(error))
        side.operations.add(operation_id, asked, future)
        # A refusal is worth waiting for, whatever the caller said.
        await asyncio.wait_for(asyncio.wrap_future(side.group.taken_up()), TAKEN_UP_TIMEOUT_S)
    return await _answer(operation_id, future, wait_s=wait_s)


async def _answer(operation_id: str, future: "Future[OperationResult]", *, wait_s: float) -> Response:
    # The operation goes on when its caller stops waiting.
    waiting = asyncio.shield(asyncio.wrap_future(future))
    try:
        result = await asyncio.wait_for(waiting, wait_s) if not future.done() else future.result()
    except TimeoutError:
        return _reply(202, operation_id=operation_id, status="pending")
    if not result.ok:
        return _refused(operation_id, result.reason)
    return _reply(200, operation_id=operation_id, status="done", membership_epoch=result.membership_epoch)


def _refused(operation_id: str, reason: str) -> Response:
    return _reply(409, operation_id=operation_id, status="refused", reason=reason)


async def _body(request: Request, kind: type[Kind]) -> Kind:
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > MAX_BODY_BYTES:
                break
    except ClientDisconnect as error:
        raise BadBody("the client went away before it had sent the body") from error
    return decode(bytes(raw), kind)


def _reply(code: int, /, **payload: Any) -> Response:
    # ASCII only, so that whatever a path held can be sent back.
    return Response(json.dumps(payload), status_code=code, media_type="application/json")
