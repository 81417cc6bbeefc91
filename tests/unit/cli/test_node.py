"""`flexfloor-node`: sweeps, ports and refusals; what it becomes is tested on a real SLURM."""

import pytest

from flexfloor.cli.node import main
from flexfloor.cli.sweep import sweep_jobs


def test_a_sweep_has_the_order_of_a_multirun() -> None:
    jobs = sweep_jobs(["experiment=quickstart", "seed=0,1", "scheduling=verl,flexfloor"])
    assert jobs == [
        ["experiment=quickstart", f"seed={seed}", f"scheduling={policy}"]
        for seed in (0, 1)
        for policy in ("verl", "flexfloor")
    ]


def test_ranges_are_axes_and_lists_are_values() -> None:
    assert sweep_jobs(["seed=range(0,3)", "+a.b=[1,2]", "c='x,y'"]) == [
        [f"seed={seed}", "+a.b=[1,2]", "c='x,y'"] for seed in range(3)
    ]


def test_a_job_of_a_sweep_is_printed_a_line_an_override(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "1", "seed=0,1", "num_steps=3"]) == 0
    assert capsys.readouterr().out.splitlines() == ["seed=1", "num_steps=3"]


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["sweep", "2", "seed=0,1"], "the sweep has 2 jobs. Fix: submit with --array=0-1"),
        (["sweep", "0", "seed"], "cannot be read as KEY=VALUE"),
        (["server", "/nowhere"], "Fix: run flexfloor-prepare with this run_dir"),
    ],
)
def test_mistakes_get_one_line(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert reason in shown.err
    assert len(shown.err.splitlines()) == 1
    assert shown.out == ""
