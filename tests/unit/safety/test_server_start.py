"""What flexfloor-serve does before it becomes the server."""

import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from flexfloor import left_overs
from sglang_patches import masked_logs, serve
from sglang_patches.serve_args import parse

FLAGS = ["--model-path", "m", "--port", "31234"]


def test_a_folder_has_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LAST_SERVER_S", 0.2)
    args = parse([*FLAGS, "--flexfloor-folder", str(tmp_path / "m")])
    (tmp_path / "m").mkdir(mode=0o700)
    other = left_overs.hold(tmp_path / "m")
    with pytest.raises(SystemExit, match=r"m: another server uses this folder. Fix: end it, or name another"):
        serve.hold_folder(args)
    os.close(other)
    serve.hold_folder(args)
    with pytest.raises(SystemExit, match="another server"):
        serve.hold_folder(args)
    (held,) = descriptors_of(tmp_path / "m" / left_overs.LOCK_NAME)
    assert os.get_inheritable(held)
    os.close(held)


def descriptors_of(path: Path) -> list[int]:
    links = {link: os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    return [int(link.name) for link, target in links.items() if target == str(path)]


@pytest.mark.parametrize(
    ("flags", "is_warned"),
    [
        ([], False),
        (["--host", "127.0.0.1"], False),
        (["--host", "0.0.0.0"], True),
        (["--host", "node1", "--admin-api-key", "k1"], False),
    ],
)
def test_an_open_server_is_warned_of(
    flags: Sequence[str], is_warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    serve.warn_of_open_server(parse([*FLAGS, *flags]).sglang_flags)
    assert ("without --admin-api-key" in capsys.readouterr().err) is is_warned


def test_keys_stay_out_of_the_server_s_log(caplog: pytest.LogCaptureFixture) -> None:
    masked_logs.install()
    masked_logs.install()
    with caplog.at_level(logging.INFO):
        logging.getLogger(masked_logs.LOGGERS[0]).info("server_args={'api_key': 'k1', 'port': %d}", 3)
    assert caplog.messages == ["server_args={'api_key': ***, 'port': 3}"]


def test_the_folder_above_is_ours_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    for name, mode in ((f"flexfloor-{owner}", 0o700), ("runtime", 0o755)):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / name))
        (tmp_path / name).mkdir(mode=0o755)
        serve.hold_folder(parse(FLAGS))
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    with pytest.raises(SystemExit, match=r"runtime belongs to somebody else. Fix: set --flexfloor-folder"):
        serve.hold_folder(parse(FLAGS))
