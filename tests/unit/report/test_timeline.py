"""A step's story, who was there when, and the picture of both."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flexfloor.errors import LedgerError
from flexfloor.records import Aborted, Finished, LedgerRecord, Submitted, moved_reason
from flexfloor.report.presence import worker_stories
from flexfloor.report.step_story import Hop, StepStory, from_restart, read_story, running_counts, tell
from flexfloor.report.timeline import TIMELINE_FOLDER, timeline_svg, write_step_timeline
from flexfloor.schedule_record import Absence, StepSchedule
from flexfloor.types import FinishReason
from tests.synthetic_run import make_run, schedule_of

SVG = "{http://www.w3.org/2000/svg}"


def submitted(name: str, rank: int, at_s: float, attempt: int = 1) -> Submitted:
    return Submitted(name, attempt, rank, at_s, "p", 0, 100, 7, ())


def finished(name: str, rank: int, at_s: float, attempt: int = 1) -> Finished:
    return Finished(name, attempt, rank, 0, FinishReason.stop, 40, 100, 10.0, at_s)


RECORDS: list[LedgerRecord] = [
    submitted("a", 0, 10.0),
    submitted("b", 1, 10.5),
    finished("a", 0, 12.0),
    Aborted("b", 1, 1, 14.0, 20, moved_reason(0)),
    submitted("b", 0, 14.25, attempt=2),
    finished("b", 0, 18.0, attempt=2),
]


def told(records: list[LedgerRecord] | None = None) -> StepStory:
    return tell(records or RECORDS, rollout_step=3, num_ranks=3)


def schedule(*absences: Absence, members: tuple[int, ...] = (0, 1, 2)) -> StepSchedule:
    return StepSchedule(
        rollout_step=3,
        num_ranks=3,
        wall_s=8.0,
        batching="fifo",
        batching_reason="",
        placement="balanced",
        placement_reason="",
        starting_members=members,
        predicted_peak_kv_tokens=(),
        kv_capacity_tokens=None,
        num_retractions=0,
        absences=absences,
    )


def test_a_story_counts_from_the_first_submission() -> None:
    story = told()
    assert (story.wall_s, story.num_ranks) == (8.0, 3)
    assert [(a.response_id, a.dp_rank, a.from_s, a.to_s) for a in story.attempts] == [
        ("a", 0, 0.0, 2.0),
        ("b", 1, 0.5, 4.0),
        ("b", 0, 4.25, 8.0),
    ]
    assert story.lengths_tokens == {"p": (40, 40)}


def test_a_move_is_told_from_a_loss() -> None:
    moved = Hop(
        response_id="b",
        source=1,
        target=0,
        left_s=4.0,
        arrived_s=4.25,
        num_tokens=20,
        is_planned=True,
        reason=moved_reason(0),
    )
    assert told().hops == (moved,)
    lost = told([*RECORDS[:3], Aborted("b", 1, 1, 14.0, 20, "silent"), *RECORDS[4:]])
    assert [(hop.is_planned, hop.reason) for hop in lost.hops] == [(False, "silent")]


def test_what_runs_at_the_end_of_a_torn_ledger_runs_to_there() -> None:
    story = told(RECORDS[:3])
    assert [(a.response_id, a.to_s, a.num_tokens) for a in story.attempts] == [
        ("a", 2.0, 40),
        ("b", 2.0, None),
    ]
    assert len(story.finished) == 1


def test_only_what_ran_after_a_restart_is_shown() -> None:
    resumed = from_restart(told(), wall_s=5.0)
    assert resumed.is_resumed
    assert [(a.response_id, a.from_s, a.to_s) for a in resumed.attempts] == [
        ("b", 0.0, 1.0),
        ("b", 1.25, 5.0),
    ]
    assert from_restart(told(), wall_s=8.25).wall_s == 8.25
    assert not from_restart(told(), wall_s=8.25).is_resumed


def test_a_clock_that_began_anew_drops_what_was_before() -> None:
    again = [submitted("c", 2, 1.0), finished("c", 2, 4.0)]
    story = told([*RECORDS, *again])
    assert [(a.response_id, a.from_s, a.to_s) for a in story.attempts] == [("c", 0.0, 3.0)]


def test_counts_change_where_responses_begin_and_end() -> None:
    assert running_counts(told().attempts) == [(0.0, 1), (0.5, 2), (2.0, 1), (4.0, 0), (4.25, 1), (8.0, 0)]


def test_a_worker_is_occupied_until_it_leaves_and_serves_while_it_has_no_work() -> None:
    workers = worker_stories(told(), schedule(Absence(dp_rank=1, from_s=5.0, to_s=7.0)))
    assert [w.in_group for w in workers] == [((0.0, 8.0),), ((0.0, 5.0), (7.0, 8.0)), ((0.0, 8.0),)]
    assert [w.own_work for w in workers] == [((0.0, 2.0), (4.25, 8.0)), ((0.5, 4.0),), ()]
    assert [w.serving_s for w in workers] == pytest.approx([2.25, 2.5, 8.0])
    assert [w.num_responses for w in workers] == [2, 0, 0]


def test_a_worker_that_was_not_there_at_the_start_is_away_until_it_works() -> None:
    workers = worker_stories(told(), schedule(members=(0,)))
    assert [w.in_group for w in workers] == [((0.0, 8.0),), ((0.5, 8.0),), ()]


def test_without_a_schedule_everybody_was_there() -> None:
    assert [w.in_group for w in worker_stories(told(), None)] == [((0.0, 8.0),)] * 3


@pytest.mark.parametrize("num_ranks", [1, 4, 8, 16, 64, 256])
def test_a_picture_has_a_row_a_worker_and_fits_a_screen(tmp_path: Path, num_ranks: int) -> None:
    (step,) = make_run(tmp_path / "run", num_ranks=num_ranks, num_steps=1, per_rank=4)
    picture = write_step_timeline(tmp_path / "run", 0)
    assert picture == tmp_path / "run" / TIMELINE_FOLDER / "step-000000.svg"
    svg = ElementTree.fromstring(picture.read_text())
    rows = [g for g in svg.iter(f"{SVG}g") if (g.findtext(f"{SVG}title") or "").startswith("worker ")]
    assert len(rows) == num_ranks
    assert float(svg.attrib["viewBox"].split()[3]) <= 900
    drawn = [path for path in svg.iter(f"{SVG}path") if path.attrib["class"] == "move"]
    swatch = 1 if drawn else 0
    assert len(drawn) - swatch == sum(len(decision.moves) for decision in step.decisions)


def test_bars_stand_where_the_axis_says() -> None:
    svg = ElementTree.fromstring(timeline_svg(told(), schedule(Absence(dp_rank=2, from_s=4.0, to_s=None))))
    row = next(g for g in svg.iter(f"{SVG}g") if g.findtext(f"{SVG}title", "").startswith("worker 2"))
    bar = next(rect for rect in row.iter(f"{SVG}rect") if rect.attrib["class"] == "serve")
    left, width = float(bar.attrib["x"]), float(bar.attrib["width"])
    ticks = {text.text: float(text.attrib["x"]) for text in svg.iter(f"{SVG}text") if text.text in ("0", "4")}
    assert left == ticks["0"]
    assert left + width == pytest.approx(ticks["4"], abs=0.1)


def test_names_from_the_data_stay_text(tmp_path: Path) -> None:
    make_run(tmp_path / "run", prompt_prefix='<script x="&">', num_steps=1)
    text = write_step_timeline(tmp_path / "run", 0).read_text()
    assert "&lt;script x=&quot;&amp;&quot;&gt;" in text
    assert "<script" not in text


def test_pictures_over_one_axis_put_a_time_at_one_place() -> None:
    ends = []
    for axis_s in (None, 16.0):
        svg = timeline_svg(told(), None, axis_s=axis_s)
        found = re.search(r'class="end" d="M([\d.]+)', svg)
        assert found is not None
        ends.append(float(found[1]))
    assert ends[0] - 76 == pytest.approx(2 * (ends[1] - 76), abs=0.2)


def test_a_ledger_is_read_without_its_tokens(tmp_path: Path) -> None:
    (step,) = make_run(tmp_path / "run", num_steps=1)
    story = read_story(tmp_path / "run", 0, num_ranks=8, schedule=schedule_of(step))
    assert sum(a.num_tokens or 0 for a in story.finished) == step.num_tokens
    assert story.wall_s == pytest.approx(step.wall_s)
    assert len(story.hops) == sum(len(decision.moves) for decision in step.decisions) > 0


def test_a_damaged_ledger_is_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run", num_steps=1)
    path = tmp_path / "run" / "ledger" / "step-000000.ledger"
    data = bytearray(path.read_bytes())
    data[200] ^= 255
    path.write_bytes(data)
    with pytest.raises(LedgerError, match=r"step-000000\.ledger"):
        write_step_timeline(tmp_path / "run", 0)
