"""What a run does when ranks of its server have ended in a step."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from flexfloor.driver.loop import Run


class Journal(list[str]):
    """Everything around the steps, which writes down what it is asked to do."""

    def __init__(self, exited: list[tuple[int, ...]]) -> None:
        self.exited = exited

    def batch(self, step: int) -> SimpleNamespace:
        return SimpleNamespace(indices=())

    def run(self, prompts: Any, *, batch: Any, rollout_step: int, weight_version: int) -> SimpleNamespace:
        self.append(f"draw {rollout_step} with weights {weight_version}")
        return SimpleNamespace(drawn=SimpleNamespace(exited=self.exited[rollout_step]))

    def use_server(self, url: str) -> None:
        self.append(f"draw from {url}")

    def wait_ready(self) -> None:
        self.append("ready")

    def sync_weights(self, weight_version: int, server_url: str) -> SimpleNamespace:
        self.append(f"weights {weight_version} to {server_url}")
        return SimpleNamespace(weight_checksum="", num_bytes=1, seconds=0.0)

    def restart(self) -> str:
        self.append("restart")
        return "second"

    def phase(self, name: str, total: int | None) -> Any:
        return nullcontext()


class Steps(Run):
    """Without training and records."""

    def _train(self, outcome: Any) -> Any:
        self._rollout.append("train")  # type: ignore[attr-defined]

    def _record(self, step: int, outcome: Any, train: Any, sync: Any) -> None:
        self._rollout.append(f"record {sync.num_bytes} bytes")  # type: ignore[attr-defined]


FIRST = "draw 0 with weights 0 | train | weights 1 to first | record 1 bytes | draw 1 with weights 1 | train"


@pytest.mark.parametrize(
    ("exited", "expected"),
    [
        ([(), ()], f"{FIRST} | weights 2 to first | record 1 bytes"),
        # A server that lost ranks takes no weights, and nobody draws from it after the last step.
        ([(), (2, 3)], f"{FIRST} | record 0 bytes"),
        # The new one starts while the trainer trains, and has the step's weights before it is drawn from.
        (
            [(3,), ()],
            "draw 0 with weights 0 | restart | draw from second | train | ready | weights 1 to second | "
            "record 1 bytes | draw 1 with weights 1 | train | weights 2 to second | record 1 bytes",
        ),
    ],
)
def test_a_server_that_lost_ranks_is_replaced_unless_the_run_is_over(
    exited: list[tuple[int, ...]], expected: str
) -> None:
    journal = Journal(exited)
    config = SimpleNamespace(
        num_steps=len(exited), trainer=SimpleNamespace(checkpoint_every_steps=0), run_dir="unused"
    )
    run = Steps(
        config,
        [],
        journal,
        journal,
        journal,
        "first",
        journal,
        journal,
        restart_server=journal.restart,  # type: ignore[arg-type]
    )
    run.steps()
    assert " | ".join(journal) == f"weights 0 to first | {expected}"
