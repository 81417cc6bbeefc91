"""A worker that dies before it takes a response is told from one that the response killed."""

import os
import signal
from collections.abc import Iterator

import pytest

from flexfloor.data.reward_process import WorkerDiedIdle, WorkerEnded, WorkerProcess
from flexfloor.data.rewards import RewardSpec
from flexfloor.types import Prompt

PROMPT = Prompt(prompt_id="prompt-7", text="q", messages=None, answer="a", source="s")
DEADLINE_S = 30.0


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    process = WorkerProcess(RewardSpec(name="sample_rewards:faulty"), None)
    process.await_ready(DEADLINE_S)
    yield process
    process.kill()


def test_dead_before_it_took_the_response(worker: WorkerProcess) -> None:
    os.kill(int(worker.ask(PROMPT, "pid", DEADLINE_S)), signal.SIGKILL)
    with pytest.raises(WorkerDiedIdle):
        worker.ask(PROMPT, "fine", DEADLINE_S)


def test_killed_by_the_response(worker: WorkerProcess) -> None:
    with pytest.raises(WorkerEnded) as caught:
        worker.ask(PROMPT, "interrupt", DEADLINE_S)
    assert not isinstance(caught.value, WorkerDiedIdle)
