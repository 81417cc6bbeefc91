"""Runs of `flexfloor-train` in processes of their own, on a model so small that a step takes a second."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from flexfloor.report.metrics import METRICS_FILE, read_metrics

SHAPE = (
    "model.num_layers=2",
    # 3 x hidden x intermediate x 4 bytes; 2 x layers x KV heads x head_dim x 4 bytes
    "model.expert_bytes=49152",
    "model.kv_bytes_per_token=512",
    "model.tiny.hidden_size=64",
    "model.tiny.head_dim=16",
    "model.tiny.moe_intermediate_size=64",
)
SMALL = (
    "experiment=quickstart",
    *SHAPE,
    "model.tiny.warmup_steps=0",
    "data.num_prompts=16",
    "data.reward=probe_rewards:share_of_digits",
    # Five prompts by three responses on four ranks: nothing divides by anything.
    "rollout.num_prompt_groups=5",
    "rollout.num_responses_per_prompt=3",
    "rollout.max_response_tokens=24",
    "algorithm.num_minibatches=1",
    "trainer.learning_rate=3e-3",
)
NUM_STEPS = 5
# Several optimizer steps and a reference model: there are logprobs to compute before a step trains.
LEARNS = [*SMALL, "algorithm.num_minibatches=3", "algorithm.kl_coef=0.01"]
START_DEADLINE_S = 400.0
STEP_DEADLINE_S = 120.0
END_DEADLINE_S = 30.0
"""The project promises 10 s for an interrupted or crashed run; a busy machine may take longer."""


class Job:
    """One running flexfloor-train."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, output: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self._output = output

    @property
    def text(self) -> str:
        """What it printed so far."""
        return self._output.read_text(errors="replace")

    def wait_for_steps(self, num_steps: int) -> None:
        deadline_s = time.monotonic() + START_DEADLINE_S + num_steps * STEP_DEADLINE_S
        while self.num_steps() < num_steps:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline_s, self.text
            time.sleep(0.05)

    def num_steps(self) -> int:
        path = self.run_dir / METRICS_FILE
        return len(read_metrics(self.run_dir)) if path.exists() else 0

    def wait_until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_DEADLINE_S
        while not holds():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline_s, self.text
            time.sleep(0.02)

    def kill(self) -> None:
        """The driver alone, at once, and without a word; the kernel tells its children."""
        self.process.kill()
        self.process.wait(END_DEADLINE_S)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)


@contextmanager
def running_job(folder: Path, overrides: Sequence[str]) -> Iterator[Job]:
    """Start a job in `folder`; one that still runs at the end of the block is killed with its children."""
    run_dir = folder / "run"
    where = [f"run_dir={run_dir}", f"hydra.run.dir={run_dir}", f"model.path={folder.parent / 'models'}"]
    with _running(folder, [*overrides, *where]) as job:
        yield job


@contextmanager
def resumed_job(folder: Path, overrides: Sequence[str] = ()) -> Iterator[Job]:
    """Go on with the job that was started in `folder`."""
    with _running(folder, [f"resume={folder / 'run'}", *overrides]) as job:
        yield job


@contextmanager
def _running(folder: Path, arguments: Sequence[str]) -> Iterator[Job]:
    run_dir, output = folder / "run", folder / "output.txt"
    folder.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "flexfloor.cli.train", *arguments]
    # Beside what finds this checkout, should it not be the installed one.
    search_path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path)}
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Tests that a shell runs in the background inherit this, and the job would not hear Ctrl-C either.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with (
        output.open("ab") as log,
        subprocess.Popen(
            argv, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=folder, start_new_session=True
        ) as process,
    ):
        try:
            yield Job(process, run_dir, output)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
