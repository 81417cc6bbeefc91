"""The page of one and of several runs, from whatever is there of them."""

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flexfloor.cli.report import main
from flexfloor.report.page import predicted_points, render_page
from flexfloor.report.run_data import chosen_steps, read_runs, short_names
from flexfloor.report.tables import config_table, decision_table, summary_table
from flexfloor.report.totals import counts, static_totals, totals
from tests.synthetic_run import make_run

_VOID = {"meta", "link"}


class Nesting(HTMLParser):
    """Checks that every element is closed in order; collects what could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for key, value in attributes if key in ("src", "href", "data", "srcset")]
        if name not in _VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    make_run(tmp_path / "static", is_elastic=False)
    make_run(tmp_path / "elastic")
    return tmp_path / "static", tmp_path / "elastic"


def test_a_page_is_whole_and_loads_nothing(pair: tuple[Path, Path]) -> None:
    reader = Nesting()
    reader.feed(render_page(read_runs(pair, most_steps=40)))
    assert reader.open == []
    assert reader.loads
    assert all(value.startswith(("#", "data:")) for value in reader.loads)


def test_figures_are_those_of_the_steps(tmp_path: Path) -> None:
    steps = make_run(tmp_path / "run")
    (run,) = read_runs([tmp_path / "run"], most_steps=40)
    own, static, told = totals(run), static_totals(run), counts(run)
    assert own.num_tokens == sum(step.num_tokens for step in steps)
    assert own.wall_s == pytest.approx(sum(step.wall_s for step in steps))
    assert own.occupied_worker_s == pytest.approx(sum(step.occupied_s for step in steps))
    assert static.occupied_worker_s == pytest.approx(8 * sum(step.wall_s for step in steps))
    assert own.tail_idle_share == pytest.approx(0.1)
    assert told.num_switches == sum(len(step.decisions) for step in steps)
    assert told.num_moves == sum(len(d.moves) for step in steps for d in step.decisions) > 0
    assert told.num_retractions == 0 + 1 + 2


def test_the_summary_shows_ratios_to_the_first_run(pair: tuple[Path, Path]) -> None:
    runs = read_runs(pair, most_steps=1)
    own, first = totals(runs[1]).worker_iterations, totals(runs[0]).worker_iterations
    assert own is not None
    assert first is not None
    assert f"x {own / first:.3g}" in summary_table(runs)
    assert summary_table(runs).count("if nobody had left") == 1


def test_a_sum_with_a_hole_is_no_number(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[1]["occupancy/worker_iterations"] = None
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (run,) = read_runs([tmp_path / "run"], most_steps=1)
    assert totals(run).worker_iterations is None
    assert totals(run).tokens_per_worker_iteration is None


def test_predictions_meet_what_came(tmp_path: Path) -> None:
    steps = make_run(tmp_path / "run", num_steps=1)
    (run,) = read_runs([tmp_path / "run"], most_steps=1)
    points = predicted_points(run)
    lengths = [r.num_tokens for r in steps[0].drawn[:4]]
    assert points[0] == (pytest.approx(next(iter(steps[0].expected.values()))), sum(lengths) / 4)
    assert len(points) == len(steps[0].expected)


def test_decisions_stand_with_their_reasons(pair: tuple[Path, Path]) -> None:
    table = decision_table(read_runs(pair, most_steps=1))
    assert "workers are drained; 210 iterations left" in table
    assert table.count("<tr>") == 1 + 2 * 3


def test_settings_that_differ_are_shown_and_others_not(pair: tuple[Path, Path]) -> None:
    table = config_table(read_runs(pair, most_steps=1))
    assert "membership.mode" in table
    assert "rollout.num_responses_per_prompt" not in table


@pytest.mark.parametrize("lost", ["schedule", "ledger", "config.yaml", "metrics.jsonl"])
def test_what_is_missing_is_said_and_the_rest_shown(tmp_path: Path, lost: str) -> None:
    make_run(tmp_path / "run")
    path = tmp_path / "run" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert main([str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Not on this page" in page
    assert f"{lost}/: no" in page or f"{lost}: not there" in page


def test_a_damaged_ledger_leaves_the_other_steps(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    path = tmp_path / "run" / "ledger" / "step-000001.ledger"
    path.write_bytes(path.read_bytes()[:300] + b"x" * 300)
    (run,) = read_runs([tmp_path / "run"], most_steps=40)
    assert sorted(run.stories) == [0, 2]
    assert any("step 1 cannot be read" in line for line in run.missing)


def test_a_bad_directory_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "runs" / "seed-0", num_steps=1)
    for folder, text in (
        (tmp_path / "nowhere", "there is no such directory"),
        (tmp_path / "runs", "neither metrics.jsonl nor ledger/step-*.ledger; runs lie below it: seed-0"),
    ):
        assert main([str(folder)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert str(folder) in lines[0]
        assert text in lines[0]


def test_damaged_metrics_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", num_steps=1)
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text("{broken\n" + path.read_text())
    assert main([str(tmp_path / "run")]) == 2
    assert f"{path}: a record before the last line is damaged" in capsys.readouterr().err


def test_data_cannot_become_markup(tmp_path: Path) -> None:
    make_run(tmp_path / "<b>run", prompt_prefix="<script>alert(1)</script>")
    page = render_page(read_runs([tmp_path / "<b>run"], most_steps=40))
    assert "<script>alert" not in page
    assert "<b>run" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_runs_get_the_shortest_names_that_differ() -> None:
    assert short_names([Path("/r/a/seed-0"), Path("/r/b/seed-0")]) == ["a/seed-0", "b/seed-0"]
    assert short_names([Path("/r/a"), Path("/r/b")]) == ["a", "b"]
    assert short_names([Path("/r/a"), Path("/r/a")]) == ["a", "a"]


@pytest.mark.parametrize("most", [1, 2, 3, 7, 40])
def test_chosen_steps_hold_the_ends_and_the_middle(most: int) -> None:
    chosen = chosen_steps(range(101), most)
    assert len(chosen) <= most
    assert chosen == sorted(set(chosen))
    if most >= 3:
        assert {0, 50, 100} <= set(chosen)
