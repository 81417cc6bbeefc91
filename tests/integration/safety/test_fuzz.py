"""Every socket that FlexFloor opens takes bad frames without a crash or a change, and counts them."""

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / room) for room in ("membership", "serve")]

from fleet import Fleet
from fuzz import FuzzResult, fuzz_http, fuzz_manager, fuzz_store, fuzz_trainer
from played_server import play_server

from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint
from flexfloor.processes import ChildProcesses
from flexfloor.rollout.ports import free_base_port
from flexfloor.training.client import TrainerClient
from flexfloor.training.command_socket import CommandSocket
from flexfloor.training.keys import read_keys, write_new_keys
from sglang_patches.elastic import group_store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

NUM_FRAMES = 600


def check(result: FuzzResult) -> None:
    assert not result.crashed, result
    assert not result.state_changed, result
    assert result.num_strangers_answered == 0, result


@pytest.mark.parametrize("wire", ["unix", "tcp"])
def test_the_manager(wire: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local = wire == "unix"
    endpoint = Endpoint.local(tmp_path / "m") if local else Endpoint.tcp("127.0.0.1", free_base_port())
    with Fleet(endpoint) as fleet:
        result = fuzz_manager(
            wire,
            endpoint,
            num_frames=NUM_FRAMES,
            seed=0,
            dropped=lambda: fleet.manager.num_dropped,
            status=fleet.manager.status,
        )
        check(result)
        assert sum(result.num_dropped.values()) >= NUM_FRAMES
        expected = {"num_frames", "too_large", "malformed", "invalid", "wrong_token", "no_hello"}
        assert result.num_dropped.keys() == expected
        # Once for each reason, however many there were.
        assert caplog.text.count("dropped a frame") == len(expected)
        with DriverClient(endpoint.for_peer()) as client:
            name = client.submit_release([2])
            fleet.turn_until(lambda: fleet.members == (0, 1))
            assert [(found.operation_id, found.ok) for found in wait_results(client)] == [(name, True)]


def wait_results(client: DriverClient) -> list:
    client.status()
    return client.poll()


@pytest.mark.parametrize("wire", ["unix", "tcp"])
def test_the_trainer(wire: str, tmp_path: Path) -> None:
    address, arguments, keys = f"ipc://{tmp_path}/t/trainer.sock", [], None
    if wire == "tcp":
        write_new_keys(tmp_path / "keys.json")
        keys, arguments = read_keys(tmp_path / "keys.json"), [str(tmp_path / "keys.json")]
        address = f"tcp://127.0.0.1:{free_base_port()}"
    script = str(Path(__file__).with_name("played_trainer.py"))
    with ChildProcesses() as children:
        child = children.start(
            "trainer", [sys.executable, script, address, *arguments], log_path=tmp_path / "log"
        )
        result = fuzz_trainer(wire, address, keys, num_frames=NUM_FRAMES, seed=0)
        check(result)
        assert result.num_answered_as_refused > NUM_FRAMES / 4
        child.check()
        with TrainerClient(address, keys=keys) as client:
            client.shutdown()
        assert child.reap(20)
        assert child.exit_code == 0
    assert (tmp_path / "log").read_text().count("dropped a frame") <= 4


def test_a_trainer_does_not_listen_where_others_could_command_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without keys anybody could command the trainer"):
        CommandSocket("tcp://127.0.0.1:1")
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ValueError, match=r"open is open to others. Fix: chmod 700"):
        CommandSocket(f"ipc://{tmp_path}/open/trainer.sock")


def test_the_store_of_new_groups(tmp_path: Path) -> None:
    endpoint = Endpoint.tcp("127.0.0.1", free_base_port())
    kept = group_store.host(endpoint)
    assert kept is not None
    member = group_store.connect(endpoint, tmp_path, 20.0)
    member.set("a", "1")

    def works() -> bool:
        other = group_store.connect(endpoint, tmp_path, 20.0)
        other.wait(["a"], timedelta(seconds=20))
        return bool(other.get("a") == b"1" == member.get("a"))

    host, _, port = endpoint.address.rpartition(":")
    check(fuzz_store("store", f"{host}:{int(port) + 1}", works, num_raw=60, seed=0))


@pytest.mark.parametrize("keys", [{}, {"api_key": "k1", "admin_api_key": "k2"}])
def test_the_routes(keys: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with play_server(monkeypatch, tmp_path, membership="elastic", floor=2, **keys) as server:
        token = keys.get("admin_api_key", server.token)
        server.authorization = f"Bearer {token}"

        def call(method: str, path: str, headers: dict[str, str], body: bytes) -> int:
            shown = {key: value.encode("utf-8") for key, value in headers.items()}
            answer = server.client.request(method, f"/flexfloor/{path}", headers=shown, content=body)
            return int(answer.status_code)

        result = fuzz_http("routes", call, token, num_requests=400, seed=0, status=membership_of(server.get))
        check(result)
        assert result.num_dropped["401"] > 30
        assert result.num_dropped["422"] > 5
        assert server.post("release", ep_ranks=[3], wait_s=20)[0] == 200


def membership_of(get: Callable[[str], object]) -> Callable[[], object]:
    def read() -> object:
        shown = get("membership").json()  # type: ignore[attr-defined]
        return {key: shown[key] for key in ("membership_epoch", "members", "states")}

    return read
