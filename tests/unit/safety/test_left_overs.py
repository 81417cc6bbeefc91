"""What killed processes leave is removed, and nothing else."""

import mmap
import os
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from flexfloor import left_overs
from flexfloor.processes import ChildProcesses

OWNER = """
import sys, tempfile
from flexfloor.left_overs import private_folder
with private_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def start_owner(temporary: Path, script: str = OWNER) -> tuple["subprocess.Popen[str]", Path]:
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_the_folder_of_a_killed_process_goes_with_the_next_start(temporary: Path) -> None:
    killed, left = start_owner(temporary)
    alive, used = start_owner(temporary)
    (left / "x.sock").touch()
    killed.kill()
    assert killed.wait(20) == -signal.SIGKILL
    assert left.exists()
    (temporary / "flexfloor-0").mkdir()
    (temporary / "other").mkdir()
    with left_overs.private_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {path.name for path in temporary.iterdir()} == {folder.name, used.name, "flexfloor-0", "other"}
    alive.communicate("", timeout=20)
    assert not used.exists()
    assert not folder.exists()


NOTES = """
import multiprocessing, os, sys
from pathlib import Path
from flexfloor.left_overs import note_shared_memory, private_folder
with private_folder() as folder:
    print(folder, flush=True)
    sharer = int(sys.stdin.readline())
    note_shared_memory(folder, [sharer])
    print("noted", flush=True)
    sys.stdin.read()
"""
SHARES = """
import multiprocessing, sys
locks = [multiprocessing.get_context("spawn").Lock() for _ in range(2)]
print(*[lock._semlock.name for lock in locks], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("is_killed", [True, False])
def test_shared_memory_that_a_killed_server_had_goes_with_its_folder(
    temporary: Path, is_killed: bool
) -> None:
    sharer, names = start_owner(temporary, SHARES)
    shared = [Path("/dev/shm", f"sem.{name.lstrip('/')}") for name in str(names).split()]
    assert sharer.stdin is not None
    owner, _folder = start_owner(temporary, NOTES)
    assert owner.stdin is not None
    assert owner.stdout is not None
    owner.stdin.write(f"{sharer.pid}\n")
    owner.stdin.flush()
    assert owner.stdout.readline() == "noted\n"
    # All at once, and its resource tracker too, as a job's end does it.
    for process in [*psutil.Process(sharer.pid).children(), sharer]:
        process.kill()
    sharer.wait(20)
    # Somebody else's by now, under the old name.
    shared[1].unlink()
    shared[1].touch()
    if is_killed:
        owner.kill()
        owner.wait(20)
        assert shared[0].exists()
        with left_overs.private_folder():
            pass
    else:
        owner.communicate(timeout=20)
    assert [path.exists() for path in shared] == [False, True]
    shared[1].unlink()


def test_a_held_folder_is_not_taken(tmp_path: Path) -> None:
    lock = left_overs.hold(tmp_path)
    with pytest.raises(BlockingIOError):
        left_overs.hold(tmp_path)
    os.close(lock)
    os.close(left_overs.hold(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [left_overs.LOCK_NAME]


def test_shared_memory_of_dead_servers(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait(20)
    names = [
        f"sgl_shm_mq_{dead.pid}_ab12cd34",
        f"sgl_shm_mq_{os.getpid()}_ab12cd34",
        "sglang_loads_mapped_1.shm",
        "sglang_loads_free_2.shm",
        "torch_123",
        "sem.mp-abc",
        "somebody",
    ]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with (tmp_path / "sglang_loads_mapped_1.shm").open("r+b") as file, mmap.mmap(file.fileno(), 0):
        removed = left_overs.remove_left_shared_memory(tmp_path, unmapped_s=-1.0)
    assert [path.name for path in removed] == [names[0], names[3]]
    assert left_overs.remove_left_shared_memory(tmp_path, unmapped_s=600.0) == []
    assert len(list(tmp_path.iterdir())) == 5


def test_servers_that_start_and_end_at_once(tmp_path: Path) -> None:
    used = tmp_path / "sglang_loads_used_1.shm"
    used.write_bytes(b"x")
    ends = threading.Event()

    def come_and_go() -> None:
        passing = [tmp_path / f"sglang_loads_passing_{i}.shm" for i in range(40)]
        while not ends.is_set():
            for path in passing:
                path.touch()
            for path in passing:
                path.unlink(missing_ok=True)

    def start() -> int:
        return sum(len(left_overs.remove_left_shared_memory(tmp_path, unmapped_s=-1.0)) for _ in range(30))

    with (
        used.open("r+b") as file,
        mmap.mmap(file.fileno(), 0),
        ThreadPoolExecutor(3) as threads,
    ):
        passing = threads.submit(come_and_go)
        try:
            removed = [start.result() for start in [threads.submit(start) for _ in range(2)]]
        finally:
            ends.set()
        passing.result()
        assert used.exists()
    assert sum(removed) > 0


def test_one_of_many_that_start_at_once_holds_a_new_folder(tmp_path: Path) -> None:
    def try_to_hold(folder: Path) -> int | None:
        barrier.wait(20)
        try:
            return left_overs.hold(folder)
        except BlockingIOError:
            return None

    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        for i in range(100):
            folder = tmp_path / str(i)
            folder.mkdir()
            found = [one for one in threads.map(try_to_hold, [folder, folder]) if one is not None]
            assert len(found) == 1
            for descriptor in found:
                os.close(descriptor)


def test_a_stopped_child_leaves_no_semaphore(tmp_path: Path) -> None:
    script = "import multiprocessing as m, time\nlock = m.get_context('spawn').Lock()\n"
    script += "print(lock._semlock.name, flush=True)\n"
    with ChildProcesses() as children:
        child = children.start(
            "child",
            [sys.executable, "-c", f"{script}time.sleep(60)"],
            log_path=tmp_path / "log",
            stop_signal=signal.SIGKILL,
        )
        while not (text := (tmp_path / "log").read_text()).endswith("\n"):
            assert not child.reap(0.05)
        name = Path("/dev/shm", f"sem.{text.strip().lstrip('/')}")
        assert name.exists()
    assert not name.exists()


def test_drafts_of_killed_processes_go_with_the_next_draft(tmp_path: Path) -> None:
    dead, used = tmp_path / ".model.a", tmp_path / ".model.b"
    for folder in (dead, used):
        folder.mkdir()
    os.close(left_overs.hold(dead))
    lock = left_overs.hold(used)
    assert left_overs.remove_left_folders(tmp_path, prefix=".model.") == [dead]
    os.close(lock)
