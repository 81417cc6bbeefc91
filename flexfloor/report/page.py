"""One self-contained HTML page about one or several runs: no request leaves it, everything is inside."""

from collections.abc import Sequence
from importlib.resources import files

from flexfloor.report.charts import NUM_COLOURS, Series, dot_chart, histogram, line_chart, pareto_chart
from flexfloor.report.markup import Markup, Part, join, tag
from flexfloor.report.run_data import RunData, chosen_steps
from flexfloor.report.tables import (
    calibration_table,
    config_table,
    decision_table,
    fact_table,
    metrics_table,
    run_mark,
    summary_table,
)
from flexfloor.report.timeline import charts_css, timeline_svg
from flexfloor.report.totals import Totals, metric_points, ratio, static_totals, totals

MOST_DOTS = 1500
"""Dots of a run in a chart; of more, every n-th is drawn."""
_CURVES = (
    ("reward", "reward/mean", None),
    ("mean response tokens", "length/mean_tokens", 0.0),
    ("tokens per occupied worker-second", "occupancy/tokens_per_occupied_worker_s", 0.0),
    ("tokens per worker-iteration", "occupancy/tokens_per_worker_iteration", 0.0),
    ("rollout tokens per second", "occupancy/throughput_tokens_per_s", 0.0),
    ("tail idle, share of worker time", "occupancy/tail_idle_share", 0.0),
)


def render_page(runs: Sequence[RunData]) -> str:
    """The page of at least one run. Runs after the eighth share colours with the first ones."""
    title = f"flexfloor: {runs[0].name}" + (f" and {len(runs) - 1} more" if len(runs) > 1 else "")
    sections = [
        ("summary", "Summary", summary_section(runs)),
        ("pareto", "Occupied time against throughput", pareto_section(runs)),
        ("timelines", "Timelines", timeline_section(runs)),
        ("curves", "Over the steps", curve_section(runs)),
        ("lengths", "Lengths and predictions", length_section(runs)),
        ("decisions", "Release decisions", decision_section(runs)),
        ("runs", "The runs", run_section(runs)),
    ]
    links = [tag("a", name, href=f"#{key}") for key, name, _ in sections]
    head = join(
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<link rel="icon" href="data:,">'),
        tag("title", title),
        tag("style", Markup(charts_css() + _file("page.css"))),
    )
    body = join(
        tag("header", tag("h1", title), tag("nav", *links)),
        _legend(runs),
        tag("main", *(tag("section", tag("h2", name), part, id=key) for key, name, part in sections)),
        tag("script", Markup(_file("page.js"))),
        by="\n",
    )
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', body), lang='en')}\n"


def summary_section(runs: Sequence[RunData]) -> Markup:
    first = f"Small figures are ratios to the first column, {runs[0].name}." if len(runs) > 1 else ""
    note = f"Sums over the steps on record. {first} A worker is occupied while it is in the group. "
    note += "Seconds depend on the machine; iterations do not."
    return join(tag("p", note, class_="note"), tag("div", summary_table(runs), class_="wide"), _missing(runs))


def pareto_section(runs: Sequence[RunData]) -> Markup:
    sums = [totals(run) for run in runs]
    names = [run.name for run in runs]
    if len(runs) == 1 and runs[0].is_elastic:
        sums.append(static_totals(runs[0]))
        names.append("if nobody had left")
    seconds = [_pair(one, sums[0], "tokens_per_s", "tokens_per_occupied_worker_s") for one in sums]
    iterations = [
        (_pair(one, sums[0], "tokens_per_iteration", "tokens_per_worker_iteration")) for one in sums
    ]
    charts = [
        pareto_chart(title, _pair_series(names, pairs), x_label=x_label, y_label=y_label)
        for title, pairs, x_label, y_label in (
            ("in seconds", seconds, "tokens per second", "tokens per occupied worker-second"),
            ("in iterations", iterations, "tokens per group iteration", "tokens per worker-iteration"),
        )
    ]
    note = (
        f"Both axes relative to {runs[0].name}; up and to the right is better. The line joins the runs that "
    )
    note += "no other beats on both. A smaller static group moves up and to the left by itself: compare at "
    note += "equal throughput."
    return join(tag("p", note, class_="note"), _grid(charts))


def timeline_section(runs: Sequence[RunData]) -> Markup:
    """Every step that was read; without the script the first, the middle and the last are there."""
    steps = sorted({step for run in runs for step in run.stories})
    if not steps:
        return tag("p", "No ledger is on record, so there is nothing to draw.", class_="note")
    marked = chosen_steps(steps, 3)
    options = [tag("option", f"step {step}", value=step, selected=step == steps[0]) for step in steps]
    names = {1: ("first",), 2: ("first", "last"), 3: ("first", "middle", "last")}[len(marked)]
    buttons = [
        tag("button", name, type="button", data_step=step) for name, step in zip(names, marked, strict=True)
    ]
    choice = tag("label", "rollout step ", tag("select", *options, id="step-choice"))
    controls = tag("div", choice, *buttons, class_="controls", hidden=True)
    panels = [_step_panel(runs, step, is_shown=step in marked) for step in steps]
    return join(controls, *panels, by="\n")


def curve_section(runs: Sequence[RunData]) -> Markup:
    charts = []
    for title, name, floor in _CURVES:
        series = [
            Series(name=run.name, colour=index % NUM_COLOURS, points=metric_points(run, name))
            for index, run in enumerate(runs)
        ]
        charts.append(line_chart(title, series, x_label="rollout step", floor=floor))
    return _grid(charts)


def length_section(runs: Sequence[RunData]) -> Markup:
    found = [[a for story in run.stories.values() for a in story.finished] for run in runs]
    lengths = [[attempt.num_tokens or 0 for attempt in one] for one in found]
    every = [max(1, length) for one in lengths for length in one] or [1]
    x_range = (float(min(every)), float(max(2, *every, min(every) + 1)))
    bars = [
        histogram(
            run.name,
            lengths[index],
            [attempt.num_tokens or 0 for attempt in found[index] if attempt.is_truncated],
            colour=index % NUM_COLOURS,
            x_range=x_range,
        )
        for index, run in enumerate(runs)
    ]
    dots = [
        Series(name=run.name, colour=index % NUM_COLOURS, points=thinned(predicted_points(run)))
        for index, run in enumerate(runs)
    ]
    scatter = dot_chart(
        "expected tokens against the mean of the group",
        dots,
        x_label="expected",
        y_label="realised mean",
        is_log=True,
    )
    note = (
        "Responses of the steps whose ledgers were read; dark bars were cut at their cap. In the scatter a "
    )
    note += "dot is a prompt: what the predictor expected before the step, and the mean of its responses."
    parts = (tag("p", note, class_="note"), _grid([*bars, scatter]), tag("h3", "Calibration by step"))
    return join(*parts, calibration_table(runs))


def decision_section(runs: Sequence[RunData]) -> Markup:
    series = [
        Series(
            name=run.name,
            colour=index % NUM_COLOURS,
            points=thinned(
                [
                    (decision.predicted_remaining_s, decision.realised_remaining_s)
                    for _, schedule in sorted(run.schedules.items())
                    for decision in schedule.decisions
                ]
            ),
        )
        for index, run in enumerate(runs)
    ]
    if not any(one.points for one in series):
        return decision_table(runs)
    chart = dot_chart(
        "rest of the step after a decision, seconds", series, x_label="predicted", y_label="realised"
    )
    return join(_grid([chart]), decision_table(runs))


def run_section(runs: Sequence[RunData]) -> Markup:
    different = config_table(runs)
    settings = join(tag("h3", "Settings in which they differ"), different) if different else ""
    every = tag("details", tag("summary", "Every metric"), metrics_table(runs))
    return join(fact_table(runs), settings, every)


def predicted_points(run: RunData) -> list[tuple[float, float]]:
    """`(expected, realised mean)` by prompt of the steps that have a schedule and a ledger."""
    points = []
    for step, story in sorted(run.stories.items()):
        schedule = run.schedules.get(step)
        for prompt in schedule.prompts if schedule else ():
            lengths = story.lengths_tokens.get(prompt.prompt_id)
            if lengths:
                points.append((prompt.expected_tokens, sum(lengths) / len(lengths)))
    return points


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    return points[:: -(-len(points) // MOST_DOTS)] if len(points) > MOST_DOTS else points


def _step_panel(runs: Sequence[RunData], step: int, *, is_shown: bool) -> Markup:
    """The step of every run that has it, over one time axis."""
    axis_s = max(run.stories[step].wall_s for run in runs if step in run.stories)
    pictures = []
    for index, run in enumerate(runs):
        if step in run.stories:
            title = f"{run.name}, rollout step {step}"
            svg = timeline_svg(
                run.stories[step], run.schedules.get(step), title=title, axis_s=axis_s, standalone=False
            )
            pictures.append(tag("div", svg, class_=f"picture c{index % NUM_COLOURS}"))
    return tag("div", *pictures, class_="step", data_step=step, hidden=not is_shown)


def _pair(one: Totals, first: Totals, x: str, y: str) -> list[tuple[float, float]]:
    pair = ratio(getattr(one, x), getattr(first, x)), ratio(getattr(one, y), getattr(first, y))
    return [] if pair[0] is None or pair[1] is None else [(pair[0], pair[1])]


def _pair_series(names: Sequence[str], pairs: Sequence[list[tuple[float, float]]]) -> list[Series]:
    return [
        Series(name=name, colour=index % NUM_COLOURS, points=pair)
        for index, (name, pair) in enumerate(zip(names, pairs, strict=True))
    ]


def _legend(runs: Sequence[RunData]) -> Markup:
    marks = [tag("li", run_mark(run.name, index)) for index, run in enumerate(runs)]
    return tag("ul", *marks, class_="legend")


def _missing(runs: Sequence[RunData]) -> Part:
    lines = [
        tag("li", run_mark(run.name, index), f": {line}")
        for index, run in enumerate(runs)
        for line in run.missing
    ]
    return tag("div", tag("strong", "Not on this page"), tag("ul", *lines), class_="missing") if lines else ""


def _grid(charts: Sequence[Markup]) -> Markup:
    return tag("div", *(tag("figure", chart) for chart in charts), class_="grid")


def _file(name: str) -> str:
    return files("flexfloor.report").joinpath(name).read_text(encoding="utf-8")
