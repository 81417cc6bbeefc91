"""Each socket of FlexFloor under bad frames: what was sent and dropped, and that nothing else happened."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import requests
import zmq
from frames import frames, honest_bodies, is_call, raw_contents, send_raw, stranger

from flexfloor.errors import DeadlineExceeded
from flexfloor.membership import messages as m
from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import CurveKeys, Endpoint
from flexfloor.membership.status import MembershipStatus
from flexfloor.training import messages as t
from flexfloor.training.client import TrainerClient

DEADLINE_S = 60.0
STRANGER_WAIT_S = 1.0
RAW_SHARE = 20
"""One raw connection for so many frames."""


@dataclass(slots=True)
class FuzzResult:
    socket: str
    num_frames: int = 0
    num_raw: int = 0
    """Connections below the protocol."""
    num_dropped: dict[str, int] = field(default_factory=dict)
    num_answered_as_refused: int = 0
    num_strangers_answered: int = 0
    """Peers without the key or the token that got an answer."""
    crashed: bool = False
    state_changed: bool = False

    def figures(self) -> dict[str, Any]:
        return asdict(self)


def fuzz_manager(
    name: str,
    endpoint: Endpoint,
    *,
    num_frames: int,
    seed: int,
    dropped: Callable[[], dict[str, int]],
    status: Callable[[], MembershipStatus],
) -> FuzzResult:
    """Strangers send anything; a peer that has shown the token sends what is no message."""
    generator, result = random.Random(f"{name}/{seed}"), FuzzResult(name)
    before, dropped_before = _state(status()), dropped()
    drawn = frames(generator, honest_bodies(), m.MAX_FRAME_BYTES)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outsider, insider = stranger(context, endpoint), stranger(context, endpoint)
    insider.send(m.encode(m.ClientHelloMsg(endpoint.token)))
    for parts in islice(drawn, num_frames):
        is_inside = generator.random() < 0.3 and not is_call(parts)
        (insider if is_inside else outsider).send_multipart(parts)
        result.num_frames += 1
    for content in islice(raw_contents(generator), num_frames // RAW_SHARE):
        send_raw(endpoint.address, content)
        result.num_raw += 1
    wait_until(lambda: sum(dropped().values()) - sum(dropped_before.values()) >= result.num_frames)
    result.num_strangers_answered += outsider.poll(0) != 0
    outsider.close()
    insider.close()
    # Above four times the limit the connection goes before the frame is read; the manager's others stay.
    giant = stranger(context, endpoint)
    giant.linger = 0
    giant.send(bytes(4 * m.MAX_FRAME_BYTES + 1))
    giant.close()
    context.term()
    result.num_dropped = {key: num - dropped_before.get(key, 0) for key, num in dropped().items()}
    for wrong in _without_key(endpoint):
        result.num_strangers_answered += is_answered(wrong)
    result.state_changed = _state(status()) != before
    with DriverClient(endpoint.for_peer(), timeout_s=DEADLINE_S) as client:
        result.crashed = client.status().failed is not None
    return result


def fuzz_trainer(
    name: str, address: str, keys: CurveKeys | None, *, num_frames: int, seed: int
) -> FuzzResult:
    """Calls that cannot be read are answered as refused; frames that are no call get no answer."""
    generator, result = random.Random(f"{name}/{seed}"), FuzzResult(name)
    with TrainerClient(address, keys=keys) as client:
        before = client.wait_ready(DEADLINE_S)
    endpoint = Endpoint(address=address, token="", curve=keys)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = stranger(context, endpoint)
    num_calls = 0
    for parts in islice(frames(generator, honest_bodies(), 1 << 20), num_frames):
        if generator.random() < 0.5:
            parts = [(1 << 40).to_bytes(8, "big"), parts[0]]
        num_calls += len(parts) == 2 and len(parts[0]) == 8
        dealer.send_multipart(parts)
        result.num_frames += 1
    for content in islice(raw_contents(generator), num_frames // RAW_SHARE):
        send_raw(address, content)
        result.num_raw += 1
    while result.num_answered_as_refused < num_calls:
        assert dealer.poll(int(1000 * DEADLINE_S)), (result, num_calls)
        _, status, body = dealer.recv_multipart()
        assert status == t.ERROR, status
        result.num_answered_as_refused += m.msgspec.msgpack.decode(body, type=t.ErrorMsg).is_refusal
    result.num_dropped = {"no_call": result.num_frames - num_calls, "unreadable": num_calls}
    dealer.close()
    context.term()
    for wrong in _without_key(endpoint):
        result.num_strangers_answered += is_trainer_answering(address, wrong.curve)
    with TrainerClient(address, keys=keys) as client:
        result.state_changed = client.wait_ready(DEADLINE_S) != before
    return result


def fuzz_store(name: str, address: str, works: Callable[[], bool], *, num_raw: int, seed: int) -> FuzzResult:
    """torch's key-value store has no keys: only that noise does not end the process that hosts it."""
    generator, result = random.Random(f"{name}/{seed}"), FuzzResult(name)
    for content in islice(raw_contents(generator), num_raw):
        send_raw(address, content)
        result.num_raw += 1
    result.crashed = not works()
    return result


BAD_BODIES = (
    *(b"", b"{", b"[]", b"\xff", b"[" * 50_000, b" " * 70_000, b"\0" * 64),
    *(b'{"no": 1}', b'{"ep_ranks": [99]}', b'{"ep_ranks": "1"}', b'{"num_ranks": -1}'),
    b'{"ep_ranks": [1], "wait_s": 1e99}',
)
PATHS = (
    "membership",
    "events/x",
    "operations/none",
    "operations/%00",
    "release",
    "rejoin",
    "rollout",
    "nobody/x",
    "nobody",
)
MAY_READ = ("membership",)
"""Without an API key everybody may."""


def fuzz_http(
    name: str,
    call: Callable[..., int],
    token: str,
    *,
    num_requests: int,
    seed: int,
    status: Callable[[], Any],
) -> FuzzResult:
    """`call(method, path, headers, body)` gives the status code. Whoever has no key changes nothing."""
    generator, result = random.Random(f"{name}/{seed}"), FuzzResult(name)
    before = status()
    for _ in range(num_requests):
        method, path = generator.choice(("GET", "POST", "POST", "POST", "PUT")), generator.choice(PATHS)
        is_inside = generator.random() < 0.3
        key = token if is_inside else generator.choice(("", "x", token[:-1], token + " x", "\u00e9"))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        bad = BAD_BODIES if is_inside else (*BAD_BODIES, b'{"ep_ranks": [1]}', b"{}", b'{"action": "begin"}')
        body = generator.choice(bad)
        if is_inside and (path == "rejoin" or (path == "rollout" and method == "POST" and not body)):
            path = "release"  # an empty rejoin is a request that can be met
        code = call(method, path, headers, body)
        result.num_frames += 1
        result.num_dropped[str(code)] = result.num_dropped.get(str(code), 0) + 1
        result.crashed |= code >= 500
        is_read = method == "GET" and path in MAY_READ
        result.num_strangers_answered += code < 400 and not is_read and not is_inside
    result.state_changed = status() != before
    return result


def http_call(url: str) -> Callable[..., int]:
    """Of a real server."""

    def call(method: str, path: str, headers: dict[str, str], body: bytes) -> int:
        shown = {key: value.encode("utf-8") for key, value in headers.items()}
        return requests.request(
            method, f"{url}/flexfloor/{path}", headers=shown, data=body, timeout=DEADLINE_S
        ).status_code

    return call


def is_answered(endpoint: Endpoint) -> bool:
    """Whether a client of this endpoint hears anything of the manager."""
    with DriverClient(endpoint, timeout_s=STRANGER_WAIT_S) as client:
        try:
            client.status()
        except DeadlineExceeded:
            return False
    return True


def is_trainer_answering(address: str, keys: CurveKeys | None) -> bool:
    with TrainerClient(address, keys=keys) as client:
        try:
            client.wait_ready(STRANGER_WAIT_S)
        except DeadlineExceeded:
            return False
    return True


def wait_until(is_there: Callable[[], object]) -> None:
    end_s, wait = time.monotonic() + DEADLINE_S, threading.Event()
    while not is_there():
        assert time.monotonic() < end_s
        wait.wait(0.02)


def _without_key(endpoint: Endpoint) -> list[Endpoint]:
    """Peers that lack something: the token; on an encrypted wire the keys, or the right ones."""
    wrong = [replace(endpoint.for_peer(), token="0" * 64)] if endpoint.token else []
    if endpoint.curve is not None:
        other = Endpoint.tcp("127.0.0.1", 1).for_peer().curve
        wrong += [replace(endpoint.for_peer(), curve=None), replace(endpoint.for_peer(), curve=other)]
    return wrong


def _state(status: MembershipStatus) -> tuple[Any, ...]:
    return status.membership_epoch, status.members, dict(status.states), status.failed
