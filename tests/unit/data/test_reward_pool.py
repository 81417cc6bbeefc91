"""The pool with real worker processes: a fault costs its own response and nothing else."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import psutil
import pytest

from flexfloor.data.reward_pool import RewardPool
from flexfloor.data.rewards import RewardSpec
from flexfloor.errors import ConfigError, RewardError
from flexfloor.types import Prompt

PROMPT = Prompt(prompt_id="prompt-7", text="q", messages=None, answer="a", source="s")
FAULTY = RewardSpec(name="sample_rewards:faulty")
DEADLINE_S = 30.0
# Never set: paces the loops that watch other processes, each of which has a deadline.
POLL = threading.Event()


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(FAULTY, num_workers=2, timeout_s=DEADLINE_S) as pool:
        pool.wait_ready()
        yield pool


def submitted(pool: RewardPool, *texts: str) -> list[Future[float]]:
    return [pool.submit(PROMPT, f"0/prompt-7/{index}", text) for index, text in enumerate(texts)]


def error_of(future: Future[float]) -> str:
    error = future.exception(DEADLINE_S)
    assert isinstance(error, RewardError)
    return str(error)


def pid_in(path: Path) -> int:
    """Process id that a reward function has written, once it has."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        if path.exists() and (text := path.read_text()):
            return int(text)
        POLL.wait(0.01)
    raise AssertionError(f"nothing was written to {path}")


def ended(pid: int) -> bool:
    """True once the process is gone, or waits for init to collect it as its parent is gone too."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        POLL.wait(0.01)
    return False


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "the function raised KeyError: 'no such key' ("),
        ("sys_exit", "the function raised SystemExit: 1 ("),
        ("os_exit", "the function ended its worker process (exit code 3)"),
        ("segfault", "the function ended its worker process (signal SIGSEGV)"),
        ("interrupt", "the function ended its worker process (signal SIGKILL, perhaps out of memory)"),
        ("nan", "the function returned nan, which is not finite"),
        ("none", "the function returned NoneType None, not a float"),
        ("true", "the function returned bool True, not a float"),
    ],
)
def test_a_fault_is_named_and_touches_no_other_response(pool: RewardPool, fault: str, said: str) -> None:
    futures = submitted(pool, "fine", "fine", fault, "fine", fault, "fine", "fine")
    for index in (2, 4):
        where = f"reward sample_rewards:faulty, prompt_id=prompt-7 response_id=0/prompt-7/{index}: "
        assert error_of(futures[index]).startswith(where + said)
    assert [futures[index].result(DEADLINE_S) for index in (0, 1, 3, 5, 6)] == [0.5] * 5


def test_a_slow_reward_is_killed_with_its_children_and_others_go_on(tmp_path: Path) -> None:
    with RewardPool(FAULTY, num_workers=2, timeout_s=1.0) as pool:
        pool.wait_ready()
        futures = submitted(
            pool, f"hang {tmp_path}/worker", f"hang_with_child {tmp_path}/child", *["fine"] * 6
        )
        for future in futures[:2]:
            assert "the function did not finish within 1 s; its worker was killed" in error_of(future)
        assert [future.result(DEADLINE_S) for future in futures[2:]] == [0.5] * 6
        assert pool.num_errors == 2
    assert ended(pid_in(tmp_path / "worker"))
    assert ended(pid_in(tmp_path / "child"))


def test_a_worker_that_dies_while_idle_costs_no_response(pool: RewardPool) -> None:
    pids = {int(future.result(DEADLINE_S)) for future in submitted(pool, *["pid"] * 50)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert all(ended(pid) for pid in pids)
    later = {int(future.result(DEADLINE_S)) for future in submitted(pool, *["pid"] * 50)}
    assert later
    assert not pids & later


def test_on_error_gives_a_reward_instead_and_counts() -> None:
    with RewardPool(FAULTY, num_workers=1, timeout_s=DEADLINE_S, on_error=-1.0) as pool:
        futures = submitted(pool, "fine", "raise", "os_exit", "fine")
        assert [future.result(DEADLINE_S) for future in futures] == [0.5, -1.0, -1.0, 0.5]
        assert pool.num_errors == 2


def test_close_ends_every_future_and_process_at_once(tmp_path: Path) -> None:
    pool = RewardPool(FAULTY, num_workers=1, timeout_s=600.0, on_error=0.0)
    running, *queued = submitted(pool, f"hang {tmp_path}/worker", "fine", "fine")
    pid = pid_in(tmp_path / "worker")
    started_s = time.monotonic()
    pool.close(timeout_s=5.0)
    assert time.monotonic() - started_s < 5.0
    # No substitute reward: that the pool closed says nothing about the response.
    assert "was still running when the pool was closed" in error_of(running)
    assert not wait(queued, timeout=DEADLINE_S).not_done
    assert all(future.cancelled() for future in queued)
    assert ended(pid)
    pool.close()
    with pytest.raises(RuntimeError, match="response_id=x: the reward pool is closed"):
        pool.submit(PROMPT, "x", "fine")


def test_a_queued_response_can_be_cancelled(tmp_path: Path) -> None:
    with RewardPool(FAULTY, num_workers=1, timeout_s=600.0) as pool:
        _, queued = submitted(pool, f"hang {tmp_path}/worker", "fine")
        pid_in(tmp_path / "worker")
        assert queued.cancel()


def test_what_a_reward_prints_goes_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log_path = tmp_path / "logs" / "rewards.log"
    with RewardPool(FAULTY, num_workers=1, timeout_s=DEADLINE_S, log_path=log_path) as pool:
        assert pool.submit(PROMPT, "r", "print").result(DEADLINE_S) == 0.5
        assert "SIGSEGV" in error_of(pool.submit(PROMPT, "r", "segfault"))
    assert capfd.readouterr() == ("", "")
    log = log_path.read_text()
    for line in ("printed by a reward", "written by a reward", "warned by a reward", "Segmentation fault"):
        assert line in log


def test_a_reward_that_cannot_run_is_refused_before_a_process_starts() -> None:
    children = psutil.Process().children()
    with pytest.raises(ConfigError, match="unknown reward"):
        RewardPool(RewardSpec(name="exakt"), num_workers=1, timeout_s=1.0)
    with pytest.raises(ValueError, match=r"num_workers=0, timeout_s=1\.0: both must be positive\. Fix: "):
        RewardPool(RewardSpec(name="exact"), num_workers=0, timeout_s=1.0)
    assert psutil.Process().children() == children


def test_a_worker_that_cannot_load_its_function_says_so_for_each_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "loads_once.py"
    module.write_text("def reward(prompt, text):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = RewardSpec(name="loads_once:reward")
    __import__("loads_once")
    module.write_text("raise OSError('no licence server')\n")
    with RewardPool(spec, num_workers=1, timeout_s=DEADLINE_S) as pool:
        with pytest.raises(RewardError, match=r"could not be loaded: it raised OSError: no licence server"):
            pool.wait_ready()
        for future in submitted(pool, "a", "b"):
            assert "could not be loaded: it raised OSError: no licence server" in error_of(future)


def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    program = (
        "import signal, sys\n"
        "from flexfloor.data.reward_pool import RewardPool\n"
        "from flexfloor.data.rewards import RewardSpec\n"
        "from flexfloor.types import Prompt\n"
        "pool = RewardPool(RewardSpec(name='sample_rewards:faulty'), num_workers=1, timeout_s=600.0)\n"
        "prompt = Prompt(prompt_id='p', text='q', messages=None, answer='a', source='s')\n"
        "pool.submit(prompt, 'r', 'hang ' + sys.argv[1])\n"
        "signal.pause()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    driver = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "worker")], env=env)
    try:
        pid = pid_in(tmp_path / "worker")
    finally:
        driver.kill()
        driver.wait(DEADLINE_S)
    assert ended(pid)


def test_workers_load_nothing_heavy(tmp_path: Path) -> None:
    spy = "import sys\ndef reward(prompt, text):\n    return float(text in sys.modules)\n"
    (tmp_path / "module_spy.py").write_text(spy)
    sys.path.insert(0, str(tmp_path))
    try:
        with RewardPool(RewardSpec(name="module_spy:reward"), num_workers=1, timeout_s=DEADLINE_S) as pool:
            for module in ("torch", "transformers", "zmq", "pyarrow", "numpy", "reasoning_gym", "hydra"):
                assert pool.submit(PROMPT, "r", module).result(DEADLINE_S) == 0.0
            assert pool.submit(PROMPT, "r", "module_spy").result(DEADLINE_S) == 1.0
    finally:
        sys.path.remove(str(tmp_path))
