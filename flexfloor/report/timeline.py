"""A rollout step as a picture: a row a worker, time to the right. PURE but for `write_step_timeline`.

worker 0 |####====......|   own work (dark: how many responses run), serving others, out of the group
worker 1 |######========|   arcs: responses that moved; numbered lines: decisions of the release policy
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from flexfloor.report.axes import Axis, short
from flexfloor.report.markup import Markup, join, number, tag
from flexfloor.report.presence import WorkerStory, worker_stories
from flexfloor.report.step_story import Hop, StepStory, read_story
from flexfloor.schedule_record import DecisionRecord, StepSchedule, read_schedule, schedule_path

TIMELINE_FOLDER = "timelines"
WIDTH = 960
_LEFT, _RIGHT = 76, 18
_ROW_PX = ((8, 24.0), (16, 19.0), (32, 13.0), (64, 10.0), (128, 6.0))
"""Up to so many workers a row is so high."""
_ROWS_AT_MOST_PX = 720.0
_PIXEL = 0.5
"""Changes nearer than this are drawn as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Where things are."""

    time: Axis
    top: float
    row: float
    num_ranks: int

    @property
    def bottom(self) -> float:
        return self.top + self.row * self.num_ranks

    @property
    def bar(self) -> float:
        return self.row - (4.0 if self.row >= 18 else 2.0 if self.row >= 9 else 1.0)

    def middle(self, rank: int) -> float:
        return self.top + self.row * (rank + 0.5)

    def bar_top(self, rank: int) -> float:
        return self.middle(rank) - self.bar / 2


def timeline_svg(
    story: StepStory,
    schedule: StepSchedule | None,
    *,
    title: str | None = None,
    axis_s: float | None = None,
    standalone: bool = True,
) -> Markup:
    """The step as SVG text. `axis_s` stretches the axis, so that pictures of several runs compare.

    A standalone picture carries its colours; others take them from the page that they are in.
    """
    workers = worker_stories(story, schedule)
    right_s = max(story.wall_s, axis_s or 0.0, 1e-3)
    frame = _Frame(
        time=Axis(low=0.0, high=right_s, start=_LEFT, end=WIDTH - _RIGHT),
        top=106.0 if schedule and schedule.decisions else 90.0,
        row=_row_px(story.num_ranks),
        num_ranks=story.num_ranks,
    )
    height = frame.bottom + 42
    decisions = schedule.decisions if schedule else ()
    body = join(
        tag("style", Markup(charts_css())) if standalone else "",
        _rect("bg", 0, 0, WIDTH, height),
        _header(story, schedule, workers, title),
        _legend(story, schedule, workers),
        _axis(frame),
        *(_row(frame, worker, _most_running(workers)) for worker in workers),
        *(_decision(frame, decision) for decision in decisions),
        _flags(frame, decisions),
        *(_hop(frame, hop) for hop in story.hops),
        _line("end", frame.time.at(story.wall_s), frame.top - 3, frame.time.at(story.wall_s), frame.bottom),
    )
    return tag(
        "svg",
        body,
        xmlns="http://www.w3.org/2000/svg",
        class_="ff timeline",
        viewBox=f"0 0 {WIDTH} {number(height)}",
        role="img",
        aria_label=title or f"timeline of rollout step {story.rollout_step}",
    )


def write_step_timeline(run_dir: Path, rollout_step: int, *, num_ranks: int = 0) -> Path:
    """Draw a step from its ledger and its schedule (if there is one) into `RUN/timelines/step-000000.svg`.

    Raises FileNotFoundError without a ledger, LedgerError or ValueError for files that cannot be read.
    """
    schedule = None
    if schedule_path(run_dir, rollout_step).exists():
        schedule = read_schedule(schedule_path(run_dir, rollout_step))
        num_ranks = schedule.num_ranks
    story = read_story(run_dir, rollout_step, num_ranks=num_ranks, schedule=schedule)
    path = run_dir / TIMELINE_FOLDER / f"step-{rollout_step:06d}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(timeline_svg(story, schedule) + "\n", encoding="utf-8")
    part.replace(path)
    return path


def charts_css() -> str:
    return files("flexfloor.report").joinpath("charts.css").read_text(encoding="utf-8")


def summary_line(story: StepStory, schedule: StepSchedule | None, workers: Sequence[WorkerStory]) -> str:
    """The step in numbers."""
    occupied_s = sum(worker.occupied_s for worker in workers)
    serving_s = sum(worker.serving_s for worker in workers)
    full_s = story.num_ranks * story.wall_s
    parts = [f"{story.num_ranks} workers, {short(story.wall_s)} s"]
    if schedule is not None and full_s:
        parts.append(f"occupied {short(occupied_s)} of {short(full_s)} worker-seconds")
    if occupied_s:
        parts.append(f"{100 * serving_s / occupied_s:.0f} % of that only serving others")
    if schedule is not None:
        parts.append(_count(len(story.hops), "move"))
        parts.append(_count(schedule.num_retractions, "retraction"))
    return "; ".join(parts) + ("; resumed after an interruption" if story.is_resumed else "")


def _count(count: int, name: str) -> str:
    return f"{count} {name}" + ("" if count == 1 else "s")


def _row_px(num_ranks: int) -> float:
    height = next((px for most, px in _ROW_PX if num_ranks <= most), 4.0)
    return min(height, max(2.0, _ROWS_AT_MOST_PX / num_ranks))


def _most_running(workers: Sequence[WorkerStory]) -> int:
    return max((count for worker in workers for _, count in worker.counts), default=1) or 1


def _header(
    story: StepStory, schedule: StepSchedule | None, workers: Sequence[WorkerStory], title: str | None
) -> Markup:
    plan = "No schedule on record: who left the group, and when, is not known."
    if schedule is not None:
        plan = f"batching: {schedule.batching} ({schedule.batching_reason}); "
        plan += f"placement: {schedule.placement} ({schedule.placement_reason})"
    return join(
        _text(_LEFT, 18, title or f"rollout step {story.rollout_step}", class_="title"),
        _text(_LEFT, 36, summary_line(story, schedule, workers)),
        tag("text", tag("title", plan), _clipped(plan, 132), x=_LEFT, y=53),
    )


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _legend(story: StepStory, schedule: StepSchedule | None, workers: Sequence[WorkerStory]) -> Markup:
    decisions = schedule.decisions if schedule else ()
    planned = [hop.is_planned for hop in story.hops]
    entries = [("run", "responses running (height)"), ("own", "own work"), ("serve", "only serving others")]
    if any(worker.occupied_s < story.wall_s for worker in workers):
        entries.append(("out", "out of the group"))
    if any(planned):
        entries.append(("move", "moved"))
    if not all(planned):
        entries.append(("lost", "lost, continued elsewhere"))
    if decisions:
        entries.append(("decision", "decision"))
    x, shown = float(_LEFT), []
    for kind, label in entries:
        shown += [_swatch(kind, x, 66), _text(x + 24, 76, label)]
        x += 24 + 6.4 * len(label) + 20
    return join(*shown)


def _swatch(kind: str, x: float, y: float) -> Markup:
    if kind in ("run", "own", "serve"):
        return _rect(kind, x, y, 18, 11)
    if kind == "decision":
        return _line(kind, x + 9, y - 1, x + 9, y + 12)
    return _line(kind, x, y + 6, x + 18, y + 6)


def _axis(frame: _Frame) -> Markup:
    parts = []
    for value in frame.time.ticks(9):
        x = frame.time.at(value)
        parts += [
            _line("grid", x, frame.top, x, frame.bottom),
            _text(x, frame.bottom + 16, short(value), text_anchor="middle"),
        ]
    middle = (frame.time.start + frame.time.end) / 2
    caption = "seconds since the rollout step began"
    parts.append(_text(middle, frame.bottom + 34, caption, text_anchor="middle"))
    parts.append(_line("axis", _LEFT, frame.bottom + 0.5, WIDTH - _RIGHT, frame.bottom + 0.5))
    return join(*parts)


def _row(frame: _Frame, worker: WorkerStory, most_running: int) -> Markup:
    rank, top = worker.dp_rank, frame.bar_top(worker.dp_rank)
    own_to_s = max((to_s for _, to_s in worker.own_work), default=0.0)
    story = (
        f"worker {rank}: {_count(worker.num_responses, 'response')} finished, own work to {own_to_s:.1f} s, "
    )
    story += f"occupied for {worker.occupied_s:.1f} s, {worker.serving_s:.1f} s of it only serving others"
    y = frame.middle(rank)
    return tag(
        "g",
        tag("title", story),
        _label(frame, rank),
        _line("out", _LEFT, y, frame.time.end, y),
        *(_span(frame, "serve", span, top) for span in worker.in_group),
        *(_span(frame, "own", span, top) for span in worker.own_work),
        _area(frame, worker, most_running),
    )


def _label(frame: _Frame, rank: int) -> Markup:
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128) if step * frame.row >= 12.5 or step == 128)
    if rank % every:
        return Markup("")
    name = f"worker {rank}" if frame.num_ranks <= 16 or rank == 0 else str(rank)
    return _text(_LEFT - 8, frame.middle(rank) + 4, name, text_anchor="end")


def _span(frame: _Frame, kind: str, span: tuple[float, float], top: float) -> Markup:
    left, right = frame.time.at(span[0]), frame.time.at(span[1])
    return _rect(kind, left, top, max(right - left, _PIXEL), frame.bar)


def _area(frame: _Frame, worker: WorkerStory, most_running: int) -> Markup:
    """How many of its responses run, as a step curve that fills the row at the step's largest count."""
    if not worker.counts:
        return Markup("")
    base = frame.bar_top(worker.dp_rank) + frame.bar
    steps: list[tuple[float, int]] = []
    for at_s, count in worker.counts:
        x = frame.time.at(at_s)
        if steps and x - steps[-1][0] < _PIXEL:
            steps[-1] = (steps[-1][0], count)
        else:
            steps.append((x, count))
    points = [f"M{number(steps[0][0])} {number(base)}"]
    for x, count in steps:
        height = max(frame.bar * count / most_running, 1.2 if count else 0.0)
        points.append(f"H{number(x)}V{number(base - height)}")
    return Markup(f'<path class="run" d="{"".join(points)}V{number(base)}Z"/>')


def _decision(frame: _Frame, decision: DecisionRecord) -> Markup:
    x = frame.time.at(decision.at_s)
    kind = "decision" if decision.outcome == "done" else "refused"
    return _line(kind, x, frame.top - 3, x, frame.bottom)


def _flags(frame: _Frame, decisions: Sequence[DecisionRecord]) -> Markup:
    """The decisions' numbers above the rows; where they would cover each other only the first one."""
    flags: list[Markup] = []
    last_x = float("-inf")
    for index, decision in enumerate(decisions, start=1):
        x = frame.time.at(decision.at_s)
        if x - last_x < 17:
            continue
        last_x = x
        kind = "flag" if decision.outcome == "done" else "flag-refused"
        told = (
            f"{index}. at {decision.at_s:.1f} s, workers {_ranks(decision.leavers)} leave: {decision.reason}"
        )
        circle = Markup(f'<circle class="{kind}" cx="{number(x)}" cy="{number(frame.top - 9)}" r="7.5"/>')
        text = _text(x, frame.top - 5.5, str(index), class_="flag-text", text_anchor="middle")
        flags.append(tag("g", tag("title", f"{told} ({decision.outcome})"), circle, text))
    return join(*flags)


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _hop(frame: _Frame, hop: Hop) -> Markup:
    kind = "move" if hop.is_planned else "lost"
    x0, y0 = frame.time.at(hop.left_s), frame.middle(hop.source)
    x1, y1 = frame.time.at(hop.arrived_s), frame.middle(hop.target)
    bend = max(x0, x1) + min(26.0, 6.0 + abs(y1 - y0) / 8)
    told = f"response {hop.response_id}: worker {hop.source} to {hop.target} at {hop.left_s:.1f} s"
    told += f" with {hop.num_tokens} tokens" + ("" if hop.is_planned else f" ({hop.reason})")
    radius = min(3.0, frame.bar / 2.5)
    points = (x0, y0, bend, y0, bend, y1, x1, y1)
    a, b, c, d, e, f, g, h = map(number, points)
    return tag(
        "g",
        tag("title", told),
        Markup(f'<path class="{kind}" d="M{a} {b}C{c} {d} {e} {f} {g} {h}"/>'),
        Markup(f'<circle class="{kind}-end" cx="{g}" cy="{h}" r="{number(radius)}"/>'),
    )


def _rect(kind: str, x: float, y: float, width: float, height: float) -> Markup:
    a, b, c, d = map(number, (x, y, width, height))
    return Markup(f'<rect class="{kind}" x="{a}" y="{b}" width="{c}" height="{d}"/>')


def _line(kind: str, x0: float, y0: float, x1: float, y1: float) -> Markup:
    a, b, c, d = map(number, (x0, y0, x1, y1))
    return Markup(f'<path class="{kind}" d="M{a} {b}L{c} {d}"/>')


def _text(
    x: float, y: float, text: str, *, class_: str | None = None, text_anchor: str | None = None
) -> Markup:
    return tag("text", text, x=number(x), y=number(y), class_=class_, text_anchor=text_anchor)
