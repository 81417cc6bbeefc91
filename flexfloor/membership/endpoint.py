"""Where the manager listens, and what a peer must hold to be heard.

On one machine: a unix socket in a folder that only its owner may enter, and a token in it. Across machines:
tcp with ZeroMQ's CURVE, keys made per start of the server; who lacks the server's public key cannot shake
hands, and the token travels encrypted. `asdict` of an endpoint is JSON-able and secret: it lies in
`endpoint.json`, mode 0600, of the same kind of folder, which all nodes see through a shared file system.
"""

import hashlib
import json
import os
import secrets
import socket as sockets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec
import zmq

from flexfloor.errors import DeadlineExceeded
from flexfloor.membership.messages import MAX_FRAME_BYTES

MAX_SOCKET_PATH_BYTES = 107
"""Of a unix socket on Linux."""
SOCKET_NAME = "manager.sock"
TOKEN_NAME = "token"
ENDPOINT_NAME = "endpoint.json"
POLL_INTERVAL_S = 0.2
"""A shared file system sends no news of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """Z85 texts."""

    server_public: str
    client_public: str
    client_secret: str = field(repr=False)
    server_secret: str | None = field(default=None, repr=False)
    """None: a peer's copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Example: endpoint = Endpoint.local("/tmp/job-1")   # and in the driver: Endpoint.read("/tmp/job-1")"""

    address: str
    """ZeroMQ's: `ipc://...` or `tcp://...`."""
    token: str = field(repr=False)
    curve: CurveKeys | None = None
    launch: str = ""
    """Which start of which server this is, in words that every node of it can work out by itself."""

    @classmethod
    def local(cls, folder: str | Path) -> Self:
        """Make the folder and a fresh token in it. Raises ValueError where others may enter the folder."""
        path = Path(folder)
        address = _local_address(path)
        _make_private(path)
        (path / ENDPOINT_NAME).unlink(missing_ok=True)
        token = secrets.token_hex(32)
        _write_private(path / TOKEN_NAME, token)
        return cls(address=address, token=token)

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """The endpoint that `publish` or else `local` left there. Raises ValueError or FileNotFoundError."""
        path = Path(folder)
        _check_private(path)
        with suppress(FileNotFoundError):
            return cls._from_text(_read_private(path / ENDPOINT_NAME), path / ENDPOINT_NAME)
        return cls(address=_local_address(path), token=_read_private(path / TOKEN_NAME).strip())

    @classmethod
    def wait(cls, folder: str | Path, *, launch: str, timeout_s: float) -> Self:
        """The endpoint that another node publishes there for this launch.

        Raises DeadlineExceeded saying what was found instead, or ValueError where others may read the folder.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            path, found = Path(folder), "no such file"
            with suppress(FileNotFoundError):
                _check_private(path)
                endpoint = cls._from_text(_read_private(path / ENDPOINT_NAME), path / ENDPOINT_NAME)
                if endpoint.launch == launch:
                    return endpoint
                found = f"it is of launch {endpoint.launch!r}"
            if time.monotonic() >= end_s:
                raise DeadlineExceeded(
                    f"{path / ENDPOINT_NAME}: none of launch {launch!r} after {timeout_s:g} s: {found}. "
                    "Fix: start the server on node 0, and name a folder that all nodes see"
                )
            time.sleep(POLL_INTERVAL_S)

    @classmethod
    def tcp(cls, host: str, port: int, launch: str = "") -> Self:
        """With keys made now. `host` is where the manager binds and the peers connect."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        keys = CurveKeys(
            server_public=server_public.decode(),
            server_secret=server_secret.decode(),
            client_public=client_public.decode(),
            client_secret=client_secret.decode(),
        )
        name = f"[{host}]" if ":" in host else host
        return cls(address=f"tcp://{name}:{port}", token=secrets.token_hex(32), curve=keys, launch=launch)

    def publish(self, folder: str | Path) -> None:
        """Make the folder and leave this endpoint there for `read` and `wait`, in place of an earlier one.

        Raises ValueError where others may enter the folder.
        """
        path = Path(folder)
        _make_private(path)
        (path / TOKEN_NAME).unlink(missing_ok=True)
        # Renamed into place: another node never reads half of it.
        _write_private(path / f"{ENDPOINT_NAME}.new", json.dumps(asdict(self)))
        (path / f"{ENDPOINT_NAME}.new").replace(path / ENDPOINT_NAME)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """From what `asdict` gave. Raises ValueError."""
        return msgspec.convert(fields, cls)

    @classmethod
    def _from_text(cls, text: str, path: Path) -> Self:
        try:
            return cls.from_json(json.loads(text))
        except ValueError as error:
            raise ValueError(f"{path} holds no endpoint: {error}. Fix: start the server anew") from error

    @property
    def is_tcp(self) -> bool:
        return self.address.startswith("tcp://")

    @property
    def fingerprint(self) -> str:
        """Differs between any two endpoints, and gives nothing of them away."""
        return hashlib.sha256(self.token.encode()).hexdigest()

    def for_peer(self) -> "Endpoint":
        """Without the manager's own secret."""
        if self.curve is None:
            return self
        keys = CurveKeys(
            server_public=self.curve.server_public,
            client_public=self.curve.client_public,
            client_secret=self.curve.client_secret,
        )
        return Endpoint(address=self.address, token=self.token, curve=keys, launch=self.launch)

    def bind(self, socket: "zmq.Socket[bytes]") -> None:
        """As the manager. Raises ValueError naming the address where it cannot be had."""
        _set_limits(socket)
        if self.curve is not None:
            if self.curve.server_secret is None:
                raise ValueError(f"{self.address}: this is a peer's endpoint, which cannot be bound")
            socket.curve_server = True
            socket.curve_publickey = self.curve.server_public.encode()
            socket.curve_secretkey = self.curve.server_secret.encode()
        socket.ipv6 = "[" in self.address
        try:
            socket.bind(_numeric(self.address) if self.is_tcp else self.address)
        except (zmq.ZMQError, OSError) as error:
            raise ValueError(f"cannot listen on {self.address}: {error}. Fix: choose another one") from error
        if self.address.startswith("ipc://"):
            Path(self.address.removeprefix("ipc://")).chmod(0o600)

    def connect(self, socket: "zmq.Socket[bytes]") -> None:
        """As a peer, under an identity that nobody can guess. The manager need not listen yet."""
        _set_limits(socket)
        socket.routing_id = b"p" + secrets.token_bytes(16)
        if self.curve is not None:
            socket.curve_serverkey = self.curve.server_public.encode()
            socket.curve_publickey = self.curve.client_public.encode()
            socket.curve_secretkey = self.curve.client_secret.encode()
        socket.ipv6 = "[" in self.address
        socket.connect(self.address)


def _numeric(address: str) -> str:
    """ZeroMQ connects to names, and listens on numbers only."""
    parts = urlsplit(address)
    number = sockets.getaddrinfo(parts.hostname, parts.port, type=sockets.SOCK_STREAM)[0][4][0]
    return f"tcp://[{number}]:{parts.port}" if ":" in str(number) else f"tcp://{number}:{parts.port}"


def _set_limits(socket: "zmq.Socket[bytes]") -> None:
    # A peer above this loses its connection; between the two limits it loses the frame and is counted.
    socket.maxmsgsize = 4 * MAX_FRAME_BYTES


def _local_address(folder: Path) -> str:
    path = folder.absolute() / SOCKET_NAME
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"{path}: {num_bytes} bytes, and the path of a unix socket has at most {MAX_SOCKET_PATH_BYTES}. "
            "Fix: choose a folder with a shorter path"
        )
    return f"ipc://{path}"


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder)


def _check_private(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{folder} is a link or a file. Fix: name a folder of your own")
    if found.st_uid != os.getuid():
        raise ValueError(f"{folder} belongs to user {found.st_uid}. Fix: name a folder of your own")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise ValueError(f"{folder} is open to others (mode {mode:04o}). Fix: chmod 700 {folder}")


def _read_private(path: Path) -> str:
    if path.is_symlink() or path.stat().st_mode & 0o077:
        raise ValueError(f"{path} is a link or open to others. Fix: chmod 600 {path}")
    return path.read_text(encoding="ascii")


def _write_private(path: Path, text: str) -> None:
    """Never through a link or into a file that somebody else has open."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)
