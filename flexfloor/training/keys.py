"""Keys of a trainer that listens on tcp: who lacks them cannot shake hands, and nothing travels in the clear.

Made for one run by `flexfloor-prepare`, in a file that only the user can read; the run and the trainer's rank
0 read it. The same scheme as the membership manager's, see `membership.endpoint`.
"""

import os
from dataclasses import asdict
from pathlib import Path

import msgspec
import zmq

from flexfloor.membership.endpoint import CurveKeys, Endpoint


def write_new_keys(path: Path) -> None:
    """Replaces the file."""
    keys = Endpoint.tcp("unused", 0).curve
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(asdict(keys) if keys else None))


def read_keys(path: Path) -> CurveKeys:
    """Raises ValueError where the file holds no keys or others may read it, OSError where it is not there."""
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path} is open to others. Fix: chmod 600 {path}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=CurveKeys)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} holds no keys: {error}. Fix: run flexfloor-prepare again") from error


def secure_trainer(socket: "zmq.Socket[bytes]", keys: CurveKeys) -> None:
    """Before the socket binds."""
    assert keys.server_secret is not None, "the file of flexfloor-prepare holds both sides"
    socket.curve_server = True
    socket.curve_publickey = keys.server_public.encode()
    socket.curve_secretkey = keys.server_secret.encode()


def secure_client(socket: "zmq.Socket[bytes]", keys: CurveKeys) -> None:
    """Before the socket connects."""
    socket.curve_serverkey = keys.server_public.encode()
    socket.curve_publickey = keys.client_public.encode()
    socket.curve_secretkey = keys.client_secret.encode()
