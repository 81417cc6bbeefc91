"""A command beside a step: real processes, told by the files that they write."""

import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from flexfloor.release.command import CommandUse

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

NODES = {0: "n1", 1: "n1", 2: "n2", 3: "n3"}
DEADLINE_S = 60.0
SCRIPT = """
import os, pathlib, signal, sys, time
ranks = os.environ["FLEXFLOOR_EP_RANKS"]
path = pathlib.Path(sys.argv[1]) / ranks
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
part = path.with_suffix(".part")
part.write_text(f"{os.getpid()} {os.environ['FLEXFLOOR_NODES']}")
part.replace(path)
time.sleep(600 if sys.argv[2] != "short" else 0)
sys.exit(3)
"""


def use_of(tmp_path: Path, manner: str, timeout_s: float = 10.0) -> CommandUse:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), manner]
    use = CommandUse(command, timeout_s=timeout_s, log_path=tmp_path / "command.log")
    use.begin(NODES)
    return use


def started(path: Path) -> tuple[psutil.Process | None, str]:
    """The command's process, None where it has ended, and the nodes that it was told."""
    end_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end_s, f"{path} was never written"
        time.sleep(0.02)
    pid, nodes = path.read_text().split(" ")
    return (psutil.Process(int(pid)) if psutil.pid_exists(int(pid)) else None), nodes


def wait_ended(process: psutil.Process) -> None:
    """Without taking its exit code from the one who started it."""
    end_s = time.monotonic() + DEADLINE_S
    with suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end_s, f"{process} goes on"
            time.sleep(0.02)


@pytest.mark.parametrize("manner", ["polite", "deaf"])
def test_it_runs_while_its_ranks_are_away_and_not_a_moment_longer(tmp_path: Path, manner: str) -> None:
    use = use_of(tmp_path, manner, timeout_s=0.5 if manner == "deaf" else 10.0)
    use.left((1, 2))
    use.left((3,))
    first, nodes = started(tmp_path / "1,2")
    second, _ = started(tmp_path / "3")
    assert nodes == "n1,n2"
    assert first is not None
    assert second is not None
    use.recall((2,), wait=True)
    assert not first.is_running()
    assert second.is_running()
    use.finish()
    assert not second.is_running()


def test_a_rank_that_is_back_by_itself_ends_it_without_a_wait(tmp_path: Path) -> None:
    use = use_of(tmp_path, "polite")
    use.left((3,))
    process, _ = started(tmp_path / "3")
    assert process is not None
    use.recall((3,), wait=False)
    wait_ended(process)
    use.finish()


def test_one_that_failed_is_named_and_one_that_does_not_start_stops_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use = use_of(tmp_path, "short")
    use.left((3,))
    process, _ = started(tmp_path / "3")
    if process is not None:
        wait_ended(process)
    use.recall((3,), wait=True)
    assert "release.command had ended with exit code 3" in caplog.text
    missing = CommandUse(["no-such-program"], timeout_s=1.0, log_path=tmp_path / "log")
    missing.begin(NODES)
    missing.left((3,))
    assert "release.command=['no-such-program'] does not start" in caplog.text
    missing.finish()
