"""Children are ended with everything below them, on time, and their errors carry their last lines."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from flexfloor.errors import ChildProcessError
from flexfloor.processes import ChildProcess, ChildProcesses, tail

DEADLINE_S = 20.0

SPAWNER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
                         start_new_session={new_session})
print("grandchild", child.pid, flush=True)
child.wait()
"""
ORPHANER = """
import subprocess, sys, time
middle = subprocess.Popen([sys.executable, "-c", {middle!r}], stdout=subprocess.PIPE)
print(middle.stdout.readline().decode(), flush=True)
middle.kill()
middle.wait()
print("killed", flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


def wait_for_line(child: ChildProcess, text: str) -> str:
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        for line in child.log_path.read_text().splitlines():
            if text in line:
                return line
        child.check()
        time.sleep(0.01)
    raise AssertionError(f"no line with {text!r}: {tail(child.log_path)}")


def start(children: ChildProcesses, tmp_path: Path, code: str) -> ChildProcess:
    return children.start("probe", [sys.executable, "-c", code], log_path=tmp_path / "probe.log")


def test_a_child_that_ended_is_reported_with_its_exit_code_and_last_lines(tmp_path: Path) -> None:
    with ChildProcesses() as children:
        child = start(children, tmp_path, "print('the reason'); raise SystemExit(3)")
        assert child.reap(DEADLINE_S)
        with pytest.raises(ChildProcessError, match=r"(?s)probe .* exit code 3.*the reason"):
            children.check()


def test_a_child_that_is_just_ending_is_found_within_the_grace(tmp_path: Path) -> None:
    with ChildProcesses() as children:
        child = start(children, tmp_path, STUBBORN)
        wait_for_line(child, "up")
        children.check_for(0.2)
        ending = threading.Timer(0.2, child.kill)
        ending.start()
        with pytest.raises(ChildProcessError, match=r"probe .* exit code -9"):
            children.check_for(DEADLINE_S)
        ending.join()


@pytest.mark.parametrize("new_session", [False, True])
def test_grandchildren_end_too_even_in_a_session_of_their_own(tmp_path: Path, new_session: bool) -> None:
    with ChildProcesses() as children:
        child = start(children, tmp_path, SPAWNER.format(new_session=new_session))
        grandchild = psutil.Process(int(wait_for_line(child, "grandchild").split()[1]))
        wait_for_line(child, "up")
        assert grandchild.is_running()
    assert not child.is_alive()
    psutil.wait_procs([grandchild], timeout=DEADLINE_S)
    assert not grandchild.is_running()


def test_what_a_killed_grandchild_has_left_ends_too(tmp_path: Path) -> None:
    with ChildProcesses() as children:
        child = start(children, tmp_path, ORPHANER.format(middle=SPAWNER.format(new_session=True)))
        orphan = psutil.Process(int(wait_for_line(child, "grandchild").split()[1]))
        wait_for_line(child, "killed")
        assert orphan.is_running()
        assert orphan not in psutil.Process(child.pid).children(recursive=True)
    psutil.wait_procs([orphan], timeout=DEADLINE_S)
    assert not orphan.is_running()


def test_a_child_that_ignores_sigterm_is_killed_within_the_limit(tmp_path: Path) -> None:
    with ChildProcesses(stop_timeout_s=2.0) as children:
        child = start(children, tmp_path, STUBBORN)
        wait_for_line(child, "up")
        started_s = time.monotonic()
    assert not child.is_alive()
    assert child.exit_code == -signal.SIGKILL
    assert time.monotonic() - started_s < DEADLINE_S


def test_stopping_one_child_leaves_the_others(tmp_path: Path) -> None:
    with ChildProcesses() as children:
        first = children.start("first", [sys.executable, "-c", STUBBORN], log_path=tmp_path / "1.log")
        second = children.start("second", [sys.executable, "-c", STUBBORN], log_path=tmp_path / "2.log")
        wait_for_line(first, "up")
        wait_for_line(second, "up")
        children.stop(first)
        assert not first.is_alive()
        assert second.is_alive()
        children.check()


def test_a_child_does_not_outlive_a_killed_driver(tmp_path: Path) -> None:
    driver = f"""
import sys, time
from pathlib import Path
from flexfloor.processes import ChildProcesses
children = ChildProcesses()
code = "import time; print('up', flush=True); time.sleep(600)"
child = children.start("probe", [sys.executable, "-c", code], log_path=Path({str(tmp_path / "probe.log")!r}))
print(child.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        os.kill(process.pid, signal.SIGKILL)
        gone, alive = psutil.wait_procs([child], timeout=DEADLINE_S)
    assert gone
    assert not alive


def test_the_tail_of_a_log_that_was_never_written(tmp_path: Path) -> None:
    assert tail(tmp_path / "none.log") == "(it wrote nothing)"


def test_the_tail_is_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    path.write_text("\n".join(f"line {number}" for number in range(50_000)))
    assert tail(path, 2) == "line 49998\nline 49999"
