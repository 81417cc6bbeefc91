"""`flexfloor-plan` through its console function: the table, the example of the docs, and refusals."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flexfloor.cli import plan

ROOT = Path(__file__).parents[3]

Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Exit code, stdout and stderr of a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flexfloor-plan", *arguments])
        try:
            code = plan.main()
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


def test_every_size_of_the_group_is_a_row(call: Plan, tmp_path: Path) -> None:
    code, out, err = call("model=qwen3_30b_a3b", "cluster=one_node_h200")
    assert (code, err) == (0, "")
    table = {row[0]: row for row in rows(out)}
    assert [*table] == ["8", "7", "6", "5", "4", "3", "2", "1"]
    assert table["8"][1:3] == ["16", "6.75 GiB"]
    assert table["1"] == ["1", "128", "54.00 GiB", "68.23 GiB", "745247", "40960", "yes"]
    assert "least floor: 1 of 8 ranks" in out
    assert list(tmp_path.iterdir()) == []


def test_two_nodes_have_16_ranks(call: Plan) -> None:
    _, out, _ = call("model=qwen3_30b_a3b", "cluster=two_nodes_h200", "num_ranks=16")
    assert rows(out)[0][:3] == ["16", "8", "3.38 GiB"]


EXAMPLES = [
    (command, shown)
    for page in sorted((ROOT / "docs").glob("*.md"))
    for command, shown in re.findall(
        r"```bash\n(flexfloor-plan [^\n]*)\n```\n\n```\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
    )
]


def test_the_docs_have_examples() -> None:
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize(("command", "shown"), EXAMPLES)
def test_an_example_of_the_docs_is_what_is_printed_or_its_end(call: Plan, command: str, shown: str) -> None:
    code, out, _ = call(*shlex.split(command)[1:])
    lines = shown.splitlines()
    assert code == 0
    assert [line.rstrip() for line in out.splitlines()][-len(lines) :] == lines


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["num_rank=4"], ["num_rank=4", "Did you mean num_ranks?"]),
        (["num_ranks=3"], ["num_ranks=3", "model.num_experts=8", "1, 2, 4, 8"]),
        (["cluster.num_devices_per_node=2", "num_ranks=4"], ["num_ranks=4", "2 devices"]),
        (["num_ranks=many"], ["num_ranks=many", "Integer"]),
        (["slot_floor=9"], ["slot_floor=9", "1 .. 8"]),
        (["usable_share=0"], ["usable_share=0.0", "above 0"]),
        (["tail_tokens=-1"], ["tail_tokens=-1", "0 or more"]),
        (["longest_tokens=257"], ["longest_tokens=257", "model.context_tokens=256"]),
        (["cluster.device_memory_bytes=1000"], ["num_ranks=8", "at size 8 a rank needs", "0.88 KiB"]),
        (
            ["model=qwen3_30b_a3b", "cluster=one_node_h100", "slot_floor=1", "tail_tokens=500000"],
            ["slot_floor=1", "102.65 GiB", "71.10 GiB", "set slot_floor to 2 or more"],
        ),
        (["model=qwen3_30b_a3b", "model.path=/nowhere"], ["model.path='/nowhere'", "no such folder"]),
        (["model=huge"], ["model=huge", "qwen3_30b_a3b, tiny_moe"]),
    ],
)
def test_is_refused_with_one_clear_line(call: Plan, overrides: list[str], parts: list[str]) -> None:
    code, out, err = call(*overrides)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    for part in [*parts, "Fix: "]:
        assert part in err


def test_sizes_are_compared_with_a_named_checkpoint(call: Plan, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 64}), encoding="utf-8")
    code, _, err = call("model=qwen3_30b_a3b", f"model.path={tmp_path}")
    assert code == 2
    assert "model.num_experts=128" in err
    assert "makes it 64" in err


def test_help_and_the_composed_plan_are_shown(call: Plan) -> None:
    _, out, _ = call("--help")
    assert "flexfloor-plan model=qwen3_30b_a3b cluster=one_node_h200" in out
    _, out, _ = call("--cfg", "job")
    assert "slot_floor: null" in out


def test_loads_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import sys; from flexfloor.cli.plan import main; code = main(); heavy = "
        "[name for name in ('torch', 'transformers', 'sglang', 'zmq') if name in sys.modules]; "
        "print('PROBE', code, heavy)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "PROBE 0 []"
