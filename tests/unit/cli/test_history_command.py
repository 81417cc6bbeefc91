"""`flexfloor-history` through its console function: import, show, refusals."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flexfloor.cli import history
from flexfloor.data.records import content_id
from flexfloor.scheduling.history import LengthHistory

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Exit code, stdout and stderr of a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flexfloor-history", *arguments])
        try:
            code = history.main()
        except SystemExit as stop:  # argparse ends the process
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return run


def write_lines(path: str, *records: object) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


JSONL = ("import", "--format", "jsonl", "--dataset", "math", "--history", "h.sqlite")
VERL = ("import", "--format", "verl", "--dataset", "math", "--history", "h.sqlite", "--cap-tokens", "8")


def test_importing_a_dump_again_adds_what_is_new_only(call: Call) -> None:
    write_lines("dump/1.jsonl", {"prompt_id": "a", "lengths": [5, 8], "rollout_step": 1})
    code, out, err = call(*JSONL, "--cap-tokens", "8", "dump")
    assert (code, err) == (0, "")
    assert out.startswith("2 responses of 1 prompts as jsonl:/")
    assert out.endswith("dump, 2 of them new\n")
    assert call(*JSONL, "--cap-tokens", "8", "dump")[1].endswith("dump, 0 of them new\n")
    write_lines("dump/2.jsonl", {"prompt_id": "b", "lengths": [3], "rollout_step": 2})
    assert call(*JSONL, "--cap-tokens", "8", "dump")[1].endswith("dump, 1 of them new\n")
    with LengthHistory.open("h.sqlite") as file:
        read = file.read("math")
    assert [(one.prompt_id, one.num_tokens, one.is_truncated) for one in read] == [
        ("a", 5, False),
        ("a", 8, True),
        ("b", 3, False),
    ]


def test_a_verl_dump_warms_the_prompts_of_the_dataset(call: Call) -> None:
    question = "What is 3 + 4?"
    write_lines("prompts.jsonl", {"prompt": question, "answer": "7", "id": "sum-1"})
    rendered = f"user\n{question}\nassistant\n"
    write_lines(
        "dump/1.jsonl", *({"input": rendered, "output": "abcd" * n, "gts": "7", "step": 1} for n in (1, 9))
    )
    code, out, err = call(
        *VERL, "--chars-per-token", "4", "--prompts", "prompts.jsonl", "--run", "old", "dump"
    )
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "2 responses of 1 prompts as old, 2 of them new",
        "1 of these prompts are in prompts.jsonl",
        "lengths are estimates at 4 characters a token",
    ]
    with LengthHistory.open("h.sqlite") as file:
        read = file.read("math")
    assert [(one.prompt_id, one.num_tokens, one.is_truncated) for one in read] == [
        ("sum-1", 2, False),
        ("sum-1", 8, True),
    ]
    call(*VERL, "--chars-per-token", "4", "--dataset", "plain", "dump")
    with LengthHistory.open("h.sqlite") as file:
        assert {one.prompt_id for one in file.read("plain")} == {content_id(question, "7")}


def test_passes_are_found_in_the_steps() -> None:
    steps = {0: {"a", "b"}, 1: {"c", "d"}, 2: {"b", "c"}, 5: {"a", "d"}, 6: {"a", "b"}, 7: {"e", "d"}}
    assert history.pass_by_step(steps) == {0: 0, 1: 0, 2: 1, 5: 1, 6: 2, 7: 2}


def test_unknown_caps_are_the_longest_response(call: Call) -> None:
    write_lines("x.jsonl", {"prompt_id": "a", "lengths": [5, 30]})
    assert call(*JSONL, "x.jsonl")[0] == 0
    with LengthHistory.open("h.sqlite") as file:
        assert [(one.cap_tokens, one.is_truncated) for one in file.read("math")] == [(30, False), (30, False)]


def test_show_tells_what_prediction_is_worth(call: Call) -> None:
    """Prompts differ by far more than their responses do, and keep their order in every pass."""
    lines = [
        {"prompt_id": f"p{p}", "lengths": [100 + 40 * p, 110 + 40 * p], "rollout_step": step}
        for step in range(3)
        for p in range(40)
    ]
    write_lines("x.jsonl", *lines)
    call(*JSONL, "--cap-tokens", "2000", "x.jsonl")
    code, out, err = call("show", "h.sqlite")
    assert (code, err) == (0, "")
    row = [cell.strip() for line in out.splitlines() if "math" in line for cell in line.split("\u2502")]
    assert row[1:7] == ["math", "240", "40", "3", "0.0%", "885"]
    assert int(row[7].rstrip("%")) > 80
    assert float(row[8]) > 0.95


def test_show_of_an_empty_history(call: Call) -> None:
    with LengthHistory.open("h.sqlite"):
        pass
    assert call("show", "h.sqlite")[:2] == (0, "h.sqlite: empty\n")


def damage(path: str) -> None:
    Path(path).write_bytes(b"no database" * 1000)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("show", "missing.sqlite"), "error: missing.sqlite: there is no such file. Fix: "),
        (("show", "broken.sqlite"), "error: broken.sqlite: damaged"),
        ((*JSONL, "missing.jsonl"), "error: missing.jsonl: there is no such file or folder. Fix: "),
        ((*JSONL, "empty.jsonl"), "error: empty.jsonl: no finished response in it. Fix: "),
        ((*JSONL, "bad.jsonl"), "error: bad.jsonl, line 1: not JSON"),
        ((*VERL, "bad.jsonl"), "error: bad.jsonl: a verl dump holds texts only. Fix: "),
        ((*JSONL, "--prompts", "missing.jsonl", "bad.jsonl"), "missing.jsonl"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(call: Call, arguments: tuple[str, ...], text: str) -> None:
    Path("bad.jsonl").write_text("{")
    Path("empty.jsonl").write_text("\n")
    damage("broken.sqlite")
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert text in err
    assert len(err.splitlines()) == 1
    assert not Path("h.sqlite").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("import",), "the following arguments are required: --format, --dataset, --history, PATH"),
        ((*JSONL, "--cap-tokens", "0", "x"), "argument --cap-tokens: 0 is not above 0"),
        ((*JSONL, "--chars-per-token", "nan", "x"), "nan is not above 0"),
        ((*JSONL, "--cap-tokens", "many", "x"), "argument --cap-tokens: invalid"),
        (("import", "--format", "csv", "x"), "invalid choice: 'csv'"),
    ],
)
def test_a_wrong_command_line_is_refused(call: Call, arguments: tuple[str, ...], text: str) -> None:
    code, _, err = call(*arguments)
    assert code == 2
    assert text in err


def test_the_commands_of_the_docs_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "history.md").read_text()
    commands = [line for line in page.splitlines() if line.startswith("flexfloor-history ")]
    seen: list[str] = []
    for name in ("_show", "_import"):
        monkeypatch.setattr(history, name, lambda arguments, name=name: seen.append(name) or 0)
    for command in commands:
        monkeypatch.setattr(sys, "argv", command.split())
        assert history.main() == 0
    assert seen == ["_show", "_import", "_import", "_import"]
