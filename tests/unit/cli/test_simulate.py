"""`flexfloor-simulate` through its console function: the example of the docs, every source, refusals."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flexfloor.cli import simulate
from flexfloor.records import Finished, Progress, Submitted
from flexfloor.rollout.ledger import Ledger, step_path
from flexfloor.types import FinishReason

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "simulate.md"
FAST = ("decision_interval_iterations=2048", "num_ranks=2", "floor=2", "trace.num_prompts_per_step=2")

Simulate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Simulate:
    """Exit code, stdout and stderr of a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flexfloor-simulate", *arguments])
        try:
            code = simulate.main()
        except SystemExit as stop:  # --help and argparse end the process
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return run


def rows(out: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("\u2502").split("\u2502")]
        for line in out.splitlines()
        if line.startswith("\u2502")
    ]


def test_the_page_shows_what_the_command_prints(call: Simulate, tmp_path: Path) -> None:
    shown = re.search(r"```bash\nflexfloor-simulate (.*?)\n```\n\n```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown
    code, out, err = call(*shlex.split(shown[1]))
    assert (code, err) == (0, "")
    assert [line.rstrip() for line in out.splitlines()] == [line.rstrip() for line in shown[2].splitlines()]
    picture = ElementTree.parse(tmp_path / "simulate.svg").getroot()
    texts = [element.text for element in picture.iter() if element.tag.endswith("text")]
    schedules = {row[0] for row in rows(out)}
    assert schedules <= {re.sub(r" \d+$", "", str(text)) for text in texts}
    assert len(PAGE.read_text().splitlines()) <= 80


def lengths_file(folder: Path) -> Path:
    path = folder / "lengths.jsonl"
    records = [
        {"prompt_id": f"p{index}", "lengths": [20 + 10 * index, 25 + 10 * index], "prompt_tokens": 9}
        for index in range(8)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_file_of_lengths_is_simulated(call: Simulate, tmp_path: Path) -> None:
    path = lengths_file(tmp_path)
    code, out, err = call("trace.source=jsonl", f"trace.paths=[{path}]", "picture=null", *FAST)
    assert (code, err) == (0, "")
    # Lengths 20, 25, 30, 35, .. 90, 95: 16 responses with a mean of 57.5.
    assert "lengths.jsonl: 4 steps, mean 58 tokens" in out
    assert "clock h200" in out
    assert rows(out)[0][:4] == ["static", "2", "1.00", "1.00"]
    assert [one.name for one in tmp_path.iterdir()] == ["lengths.jsonl"]


def test_a_cold_start_is_scheduled_in_data_order(call: Simulate, tmp_path: Path) -> None:
    arguments = ("trace.source=jsonl", f"trace.paths=[{lengths_file(tmp_path)}]", "trace.warm=false")
    _, out, _ = call(*arguments, "picture=null", *FAST)
    assert "first step of `bucketed`: no history" in out


def write_ledger(run_dir: Path, step: int, lengths: dict[str, int]) -> None:
    path = step_path(run_dir / "ledger", step)
    with Ledger.open(path, rollout_step=step, weight_version=step, num_responses=len(lengths)) as ledger:
        for name, length in lengths.items():
            response_id = f"{step}/{name}/0"
            ledger.append(
                Submitted(
                    response_id=response_id,
                    attempt=1,
                    dp_rank=0,
                    at_s=0.0,
                    prompt_id=name,
                    sample_index=0,
                    cap_tokens=64,
                    sampling_seed=0,
                    prompt_token_ids=(1, 2, 3),
                )
            )
            ledger.append(
                Progress(
                    response_id=response_id,
                    attempt=1,
                    offset_tokens=0,
                    token_ids=[5] * length,
                    logprobs=[-1.0] * length,
                )
            )
            ledger.append(
                Finished(
                    response_id=response_id,
                    attempt=1,
                    dp_rank=0,
                    weight_version=step,
                    finish_reason=FinishReason.stop,
                    num_tokens=length,
                    cap_tokens=64,
                    started_at_s=0.0,
                    finished_at_s=1.0,
                )
            )


def test_the_ledgers_of_a_run_are_a_trace_of_its_passes(tmp_path: Path) -> None:
    for step, lengths in enumerate([{"a": 10, "b": 20}, {"c": 30}, {"a": 11, "c": 31}, {"b": 21}]):
        write_ledger(tmp_path / "run", step, lengths)
    groups, cap_tokens = simulate._ledger_groups([tmp_path / "run"])
    found = {(group.prompt_id, group.pass_index): group.lengths for group in groups}
    assert found == {
        ("a", 0): (10,),
        ("b", 0): (20,),
        ("c", 0): (30,),
        ("a", 1): (11,),
        ("c", 1): (31,),
        ("b", 1): (21,),
    }
    assert cap_tokens == 64
    assert {group.prompt_tokens for group in groups} == {3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace.regime=Z"], "trace.regime='Z': there is no such regime. Fix: choose one of A, B, B0"),
        (["trace.source=jsonl"], "trace.paths=[]: names no files"),
        (["trace.source=run", "trace.paths=[nowhere]"], "trace.paths='nowhere': there is no such file"),
        (["floor=9"], "floor=9: so few ranks cannot hold the model, or it is above num_ranks"),
        (["trace.prompt_share=1.5"], "trace.prompt_share=1.5: is no share of a variance"),
        (["other_bytes=200000000000"], "num_ranks=8: at size 8 a rank needs"),
        (["windows=3"], "windows=3: there is no such key"),
    ],
)
def test_what_is_wrong_is_one_line(call: Simulate, arguments: list[str], message: str) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert len(err.splitlines()) == 1


def test_an_empty_log_is_refused(call: Simulate, tmp_path: Path) -> None:
    (tmp_path / "run" / "ledger").mkdir(parents=True)
    code, _, err = call("trace.source=run", "trace.paths=[run]")
    assert code == 2
    assert "there is no response in it" in err
