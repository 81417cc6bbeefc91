"""Frames that no honest peer sends, drawn by a seed, and how they are sent."""

import random
import socket
from collections.abc import Iterator, Sequence

import msgspec
import zmq

from flexfloor.membership import messages as m
from flexfloor.membership.endpoint import Endpoint

RAW_TIMEOUT_S = 5.0
_ZMTP_GREETING = bytes([0xFF, 0, 0, 0, 0, 0, 0, 0, 1, 0x7F, 3, 1]) + b"NULL".ljust(20, b"\0") + bytes(32)
HONEST: tuple[msgspec.Struct, ...] = (
    m.ReleaseMsg("x", (1, 2)),
    m.RejoinMsg("y"),
    m.StatusRequestMsg(3),
    m.HeartbeatMsg(0.0),
    *(
        m.NumberedReportMsg(1, 0, report)
        for report in (
            m.DrainFinishedMsg(),
            m.SwitchedMsg(9, 0.1, 8),
            m.CancelAskedMsg(4),
            m.WorkArrivedMsg(),
            m.GoodbyeMsg("over"),
            m.RecoveryFailedMsg(generation=1, reason="x"),
        )
    ),
    m.ClientHelloMsg("0" * 64),
)
"""Well-formed; a manager drops them too, of a peer that has not shown the token."""


def bodies(generator: random.Random, honest: Sequence[bytes], limit_bytes: int) -> Iterator[bytes]:
    """Endless: noise, damaged and unknown messages, and sizes just above the limit (rarely)."""
    while True:
        text = generator.choice(honest)
        match generator.randrange(12):
            case 0:
                yield generator.randbytes(generator.randrange(200))
            case 1:
                yield text[: generator.randrange(len(text))]
            case 2:
                place = generator.randrange(len(text))
                yield text[:place] + bytes([text[place] ^ (1 << generator.randrange(8))]) + text[place + 1 :]
            case 3:
                yield text + generator.randbytes(generator.randrange(1, 9))
            case 4:
                yield b"\x91" * generator.choice((10, 5_000, 100_000))  # nested
            case 5:
                yield (
                    generator.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6")) + b"\xff" * 4
                )  # long by its own word
            case 6:
                yield msgspec.msgpack.encode(
                    {"type": generator.choice(("Nobody", "", "HelloMsg")), "ep_rank": 1}
                )
            case 7:
                yield msgspec.msgpack.encode([generator.choice((None, True, -1, 1.5, float("nan")))] * 9)
            case 8:
                yield b"\xa4\xff\xfe\xfd\xfc"  # no UTF-8
            case 9:
                yield msgspec.msgpack.encode(
                    {"type": "ReleaseMsg", "ep_ranks": {"a": [2**63]}, "operation_id": 7}
                )
            case 10:
                yield text
            case _:
                is_large = generator.random() < 0.02
                yield bytes(limit_bytes + 1) if is_large else b""


def frames(generator: random.Random, honest: Sequence[bytes], limit_bytes: int) -> Iterator[list[bytes]]:
    """One above the limit, then mostly one frame, sometimes several."""
    yield [bytes(limit_bytes + 1)]
    drawn = bodies(generator, honest, limit_bytes)
    while True:
        number = 1 if generator.random() < 0.85 else generator.randrange(2, 6)
        yield [next(drawn) for _ in range(number)]


def honest_bodies() -> list[bytes]:
    return [m.encode(message) for message in HONEST]


def is_call(parts: list[bytes]) -> bool:
    """Whether the manager would take these frames of a peer that has shown the token."""
    try:
        m.decode_from_peer(parts)
    except m.BadFrame:
        return False
    return True


def stranger(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: Endpoint) -> "zmq.Socket[bytes]":
    """A peer that holds the keys of the wire, if there are any, and no token."""
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 5000
    dealer.sndhwm = 0
    endpoint.for_peer().connect(dealer)
    return dealer


def send_raw(address: str, content: bytes) -> None:
    """Bytes below ZeroMQ or HTTP; the other side may close at any time."""
    family, target = _target(address)
    with socket.socket(family, socket.SOCK_STREAM) as raw:
        raw.settimeout(RAW_TIMEOUT_S)
        raw.connect(target)
        try:
            raw.sendall(content)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(4096):
                pass
        except OSError:
            return


def raw_contents(generator: random.Random) -> Iterator[bytes]:
    while True:
        junk = generator.randbytes(generator.choice((0, 1, 9, 64, 3000)))
        yield (
            generator.choice(
                (b"", _ZMTP_GREETING, _ZMTP_GREETING[:20], b"POST /flexfloor/release HTTP/1.1\r\n")
            )
            + junk
        )


def _target(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    if address.startswith("ipc://"):
        return socket.AF_UNIX, address.removeprefix("ipc://")
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.AF_INET, (host, int(port))
