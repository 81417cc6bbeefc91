"""The key-value store in which the members of a new group find each other.

It must outlive every rank, and torch's own lies in rank 0. On one node it is a file; on several the server's
main process hosts it, which lives as long as the server. Like torch's own it knows no password: whoever
reaches its port could break the forming of a group, but not read weights or requests.
"""

import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from flexfloor.membership.endpoint import Endpoint
from sglang_patches.elastic.groups import gather_objects
from sglang_patches.plugin import refuse

CONNECT_TIMEOUT_S = 300.0
"""The main process makes the store while the ranks load the model."""
AGREE_TIMEOUT_S = 120.0
"""A file system between machines may show an old file for a minute."""
POLL_INTERVAL_S = 1.0
FILE_NAME = "groups"


def host(endpoint: Endpoint) -> TCPStore | None:
    """The store of a server on tcp, to be kept by the main process; None where a file does.

    Raises ValueError naming the address where it cannot be had.
    """
    if not endpoint.is_tcp:
        return None
    name, port = _address(endpoint)
    family = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][0]
    try:
        # Given a socket, torch listens on this address only, and not on every interface.
        listening = socket.create_server((name, port), family=family)
    except OSError as error:
        raise ValueError(f"cannot listen on {name}:{port}: {error}. Fix: choose another port") from error
    return TCPStore(name, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def connect(endpoint: Endpoint, folder: Path, timeout_s: float) -> distributed_c10d.Store:
    """A rank's view of the store. `timeout_s`: longest wait for another member's key."""
    if not endpoint.is_tcp:
        return torch._C._distributed_c10d.FileStore(str(folder / FILE_NAME))
    name, port = _address(endpoint)
    store = TCPStore(name, port, is_master=False, timeout=timedelta(seconds=CONNECT_TIMEOUT_S))
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def agreed_endpoint(full_group: Any, folder: Path) -> Endpoint:
    """The endpoint, the same on all ranks: that of rank 0. Collective over the group.

    A node could have read what an earlier server left in the folder. Ends the process where it still does
    when the deadline has passed.
    """
    endpoint = Endpoint.read(folder)
    if not endpoint.is_tcp:
        return endpoint
    wanted = gather_objects(full_group, endpoint.fingerprint)[0]
    end_s = time.monotonic() + AGREE_TIMEOUT_S
    while endpoint.fingerprint != wanted:
        if time.monotonic() >= end_s:
            refuse(
                f"{folder / 'endpoint.json'} on {socket.gethostname()} is not the one that node 0 wrote. "
                "Fix: name a --flexfloor-folder that all nodes see"
            )
        time.sleep(POLL_INTERVAL_S)
        endpoint = Endpoint.read(folder)
    return endpoint


def _address(endpoint: Endpoint) -> tuple[str, int]:
    parts = urlsplit(endpoint.address)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port + 1
