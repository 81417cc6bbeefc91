"""Endpoints: who may read them, and what is refused before anything listens."""

import dataclasses
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flexfloor.errors import DeadlineExceeded
from flexfloor.membership.endpoint import Endpoint


def test_local_endpoint_is_private_and_readable_by_its_owner(tmp_path: Path) -> None:
    endpoint = Endpoint.local(tmp_path / "a" / "b")
    assert endpoint.address == f"ipc://{tmp_path}/a/b/manager.sock"
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "b" / "token").stat().st_mode) == 0o600
    assert Endpoint.read(tmp_path / "a" / "b") == endpoint
    assert len(endpoint.token) == 64
    assert endpoint.token not in repr(endpoint)
    assert Endpoint.local(tmp_path / "a" / "b").token != endpoint.token


def test_folder_of_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    with pytest.raises(ValueError, match=r"open is open to others \(mode 0755\). Fix: chmod 700 "):
        Endpoint.local(folder)
    folder.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(folder)
    for refuse in (Endpoint.local, Endpoint.read):
        with pytest.raises(ValueError, match="link is a link or a file"):
            refuse(link)
    Endpoint.local(folder)
    (folder / "token").chmod(0o640)
    with pytest.raises(ValueError, match="token is a link or open to others"):
        Endpoint.read(folder)


def test_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    owner = folder.stat().st_uid
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    with pytest.raises(ValueError, match=f"folder belongs to user {owner}. Fix: name a folder of your own"):
        Endpoint.local(folder)


def test_planted_token_file_is_not_written_through(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    target = tmp_path / "target"
    target.write_text("kept")
    (folder / "token").symlink_to(target)
    Endpoint.local(folder)
    assert target.read_text() == "kept"
    assert not (folder / "token").is_symlink()


def test_long_path_is_refused_before_the_folder_is_made(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    with pytest.raises(ValueError, match=r"unix socket has at most 107\. Fix: choose a folder"):
        Endpoint.local(folder)
    assert not folder.exists()


def test_tcp_endpoint_has_keys_and_survives_json() -> None:
    endpoint = Endpoint.tcp("::1", 4000)
    assert endpoint.address == "tcp://[::1]:4000"
    assert endpoint.curve is not None
    assert endpoint.curve.server_secret not in repr(endpoint)
    assert Endpoint.from_json(json.loads(json.dumps(dataclasses.asdict(endpoint)))) == endpoint
    peer = endpoint.for_peer()
    assert peer.curve == dataclasses.replace(endpoint.curve, server_secret=None)
    assert Endpoint.tcp("::1", 4000).curve != endpoint.curve
    with pytest.raises(ValueError, match="required field"):
        Endpoint.from_json({"address": "tcp://a:1"})


def test_published_endpoint_is_read_whole_by_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    Endpoint.local(folder)
    endpoint = Endpoint.tcp("127.0.0.1", 4000, launch="job 7")
    endpoint.publish(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["endpoint.json"]
    assert stat.S_IMODE((folder / "endpoint.json").stat().st_mode) == 0o600
    assert Endpoint.read(folder) == endpoint
    assert Endpoint.wait(folder, launch="job 7", timeout_s=0.0) == endpoint
    (folder / "endpoint.json").chmod(0o640)
    with pytest.raises(ValueError, match=r"endpoint\.json is a link or open to others"):
        Endpoint.read(folder)


def test_a_unix_server_in_the_same_folder_takes_over(tmp_path: Path) -> None:
    Endpoint.tcp("127.0.0.1", 4000).publish(tmp_path / "m")
    endpoint = Endpoint.local(tmp_path / "m")
    assert Endpoint.read(tmp_path / "m") == endpoint


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    Endpoint.tcp("127.0.0.1", 4000).publish(tmp_path / "m")
    (tmp_path / "m" / "endpoint.json").write_text('{"address": 5')
    with pytest.raises(ValueError, match=r"m/endpoint\.json holds no endpoint: .* Fix: start"):
        Endpoint.read(tmp_path / "m")


def test_waiting_for_another_launch_says_what_lies_there(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    with pytest.raises(
        DeadlineExceeded, match=r"launch 'job 8' after 0 s: no such file\. Fix: start the server"
    ):
        Endpoint.wait(folder, launch="job 8", timeout_s=0.0)
    Endpoint.tcp("127.0.0.1", 4000, launch="job 7").publish(folder)
    with pytest.raises(DeadlineExceeded, match="it is of launch 'job 7'"):
        Endpoint.wait(folder, launch="job 8", timeout_s=0.0)


def test_an_endpoint_published_later_ends_the_wait(tmp_path: Path) -> None:
    endpoint = Endpoint.tcp("127.0.0.1", 4000, launch="job 8")
    Endpoint.tcp("127.0.0.1", 4000, launch="job 7").publish(tmp_path / "m")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Endpoint.wait, tmp_path / "m", launch="job 8", timeout_s=20.0)
        endpoint.publish(tmp_path / "m")
        assert waiting.result(20.0) == endpoint
