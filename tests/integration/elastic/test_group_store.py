"""The store of a server on tcp: one process hosts it, ranks find each other's keys in it."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from flexfloor.membership.endpoint import Endpoint
from flexfloor.rollout.ports import free_base_port
from sglang_patches.elastic import group_store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

DEADLINE_S = 60.0


def test_ranks_meet_in_the_store_that_the_main_process_hosts(tmp_path: Path) -> None:
    port = free_base_port()
    endpoint = Endpoint.tcp("127.0.0.1", port)
    with ThreadPoolExecutor(2) as pool:
        # A rank may be there before the main process is.
        early = pool.submit(group_store.connect, endpoint, tmp_path, DEADLINE_S)
        kept = group_store.host(endpoint)
        assert kept is not None
        first, second = early.result(DEADLINE_S), group_store.connect(endpoint, tmp_path, DEADLINE_S)
        waiting = pool.submit(first.get, "flexfloor:0.1:3")
        second.set("flexfloor:0.1:3", "here")
        assert waiting.result(DEADLINE_S) == b"here"
        with pytest.raises(RuntimeError, match="timeout"):
            first.wait(["nobody sets this"], timedelta(milliseconds=50))
    # On this address only: the other addresses of the host stay closed.
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.2", port + 1)) != 0


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .* Fix: choose another"
        ):
            group_store.host(Endpoint.tcp("127.0.0.1", port - 1))


def test_a_server_on_a_unix_socket_keeps_its_groups_in_a_file(tmp_path: Path) -> None:
    endpoint = Endpoint.local(tmp_path / "m")
    assert group_store.host(endpoint) is None
    store = group_store.connect(endpoint, tmp_path / "m", DEADLINE_S)
    store.set("key", "value")
    assert group_store.connect(endpoint, tmp_path / "m", DEADLINE_S).get("key") == b"value"
    assert (tmp_path / "m" / "groups").exists()
