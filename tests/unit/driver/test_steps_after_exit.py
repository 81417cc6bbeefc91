"""What a run does when ranks of its server have ended in a step."""

from collections.abc import Collection
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from flexfloor.config.choices import ReleaseUse
from flexfloor.driver.resume import RunStart
from flexfloor.driver.services import ServerEnded
from flexfloor.driver.steps import Run
from flexfloor.driver.stopping import StopSignals
from flexfloor.errors import FlexfloorError


class Journal(list[str]):
    """Everything around the steps, which writes down what it is asked to do."""

    def __init__(
        self, exited: list[tuple[int, ...]], deaths: Collection[str] = (), losses: Collection[str] = ()
    ) -> None:
        self.exited = exited
        self.deaths = set(deaths)
        self.losses = set(losses)
        self.lost: tuple[int, ...] = ()

    def die_in(self, what: str) -> None:
        """The server ends the first time that it is asked this."""
        if what in self.deaths:
            self.deaths.remove(what)
            self.append(f"dies in {what}")
            raise ServerEnded(what)

    def refuse_in(self, what: str) -> None:
        """The server has lost a rank, and lives."""
        if what in self.losses:
            self.lost = (1,)
            raise FlexfloorError(what)

    def lost_ranks(self) -> tuple[int, ...]:
        return self.lost

    def batch(self, step: int) -> SimpleNamespace:
        return SimpleNamespace(indices=())

    def run(
        self,
        prompts: Any,
        requests: Any,
        *,
        batch: Any,
        rollout_step: int,
        weight_version: int,
        weight_checksum: str,
        ahead: Any,
    ) -> SimpleNamespace:
        assert weight_checksum == f"of {weight_version}"
        self.append(f"draw {rollout_step} with weights {weight_version}")
        self.die_in(f"draw {rollout_step}")
        return SimpleNamespace(drawn=SimpleNamespace(is_server_whole=not self.exited[rollout_step]))

    def use_server(self, url: str) -> None:
        self.append(f"draw from {url}")

    def wait_ready(self) -> None:
        self.append("ready")

    def sync_weights(self, weight_version: int, server_url: str) -> SimpleNamespace:
        self.append(f"weights {weight_version} to {server_url}")
        self.die_in(f"sync {weight_version}")
        self.refuse_in(f"sync {weight_version} of {server_url}")
        return SimpleNamespace(weight_checksum=f"of {weight_version}", num_bytes=1, seconds=0.0)

    def say(self, text: str) -> None:
        pass

    def restart(self) -> str:
        self.append("restart")
        return "second"

    def phase(self, name: str, total: int | None) -> Any:
        return nullcontext()


class Steps(Run):
    """Without training and records."""

    def _train(self, outcome: Any, ahead: Any) -> Any:
        self._rollout.append("train")  # type: ignore[attr-defined]

    def _record(self, step: int, outcome: Any, train: Any, sync: Any, ahead: Any) -> None:
        # What the line of a step shows.
        assert {"rollout", "train", "sync"} <= self._seconds.keys()
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
    steps_of(journal).run()
    assert " | ".join(journal) == f"weights 0 to first | {expected}"


def steps_of(journal: Journal) -> Steps:
    config = SimpleNamespace(
        num_steps=len(journal.exited),
        trainer=SimpleNamespace(checkpoint_every_steps=0, checkpoint_keep=2),
        cluster=SimpleNamespace(max_server_restarts=2, server_url=None),
        release=SimpleNamespace(use=ReleaseUse.exit),
        rollout=None,
        seed=0,
        run_dir="unused",
    )
    return Steps(
        config,
        [],
        journal,
        journal,
        journal,
        "first",
        journal,
        journal,
        StopSignals(),
        start=RunStart(run_id="a run"),
        restart_server=journal.restart,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("deaths", "expected"),
    [
        # The step's very weights go to the new server, and the same step is drawn on.
        (
            {"draw 0"},
            "draw 0 with weights 0 | dies in draw 0 | restart | draw from second | ready | "
            "weights 0 to second | draw 0 with weights 0 | train | weights 1 to second | record 1 bytes",
        ),
        # What was trained is not trained again.
        (
            {"sync 1"},
            "draw 0 with weights 0 | train | weights 1 to first | dies in sync 1 | restart | "
            "draw from second | ready | weights 1 to second | record 1 bytes",
        ),
        (
            {"sync 0"},
            "dies in sync 0 | restart | draw from second | ready | weights 0 to second | "
            "draw 0 with weights 0 | train | weights 1 to second | record 1 bytes",
        ),
    ],
)
def test_a_server_that_ends_is_replaced_and_the_step_goes_on(deaths: Collection[str], expected: str) -> None:
    journal = Journal([()], deaths)
    steps_of(journal).run()
    assert " | ".join(journal) == f"weights 0 to first | {expected}"
    assert not journal.deaths


@pytest.mark.parametrize("version", [0, 1])
def test_a_server_that_loses_a_rank_before_a_sync_is_replaced(version: int) -> None:
    journal = Journal([()], losses={f"sync {version} of first"})
    steps_of(journal).run()
    anew = f"weights {version} to first | restart | draw from second | ready | weights {version} to second"
    assert anew in " | ".join(journal)
    assert journal[-1] == "record 1 bytes"


def test_a_sync_that_fails_with_a_whole_server_ends_the_run() -> None:
    journal = Journal([()], losses={"sync 1 of first"})
    journal.lost_ranks = lambda: ()  # type: ignore[method-assign]
    with pytest.raises(FlexfloorError, match="sync 1 of first"):
        steps_of(journal).run()
    assert "restart" not in journal


def test_servers_that_do_nothing_but_end_end_the_run() -> None:
    journal = Journal([()])

    def dies(what: str) -> None:
        raise ServerEnded(what)

    journal.die_in = dies  # type: ignore[method-assign]
    with pytest.raises(ServerEnded):
        steps_of(journal).run()
    assert journal.count("restart") == 2
