"""The page's tables: runs beside each other, decisions, calibration, settings. PURE."""

from collections.abc import Callable, Sequence

from flexfloor.report.axes import short
from flexfloor.report.markup import Markup, Part, join, tag
from flexfloor.report.run_data import RunData
from flexfloor.report.totals import Totals, counts, metric_means, ratio, static_totals, totals
from flexfloor.schedule_record import DecisionRecord

MOST_DECISIONS = 400
"""Rows of the table of decisions; the rest is counted."""

_Row = tuple[str, str, Callable[[Totals], float | None]]
_FIGURES: tuple[_Row, ...] = (
    ("response tokens", "", lambda t: t.num_tokens),
    ("rollout wall time", "s", lambda t: t.wall_s),
    ("tokens per second", "", lambda t: t.tokens_per_s),
    ("occupied worker time", "worker-s", lambda t: t.occupied_worker_s),
    ("tokens per occupied worker-second", "", lambda t: t.tokens_per_occupied_worker_s),
    ("worker-iterations", "", lambda t: t.worker_iterations),
    ("tokens per worker-iteration", "", lambda t: t.tokens_per_worker_iteration),
    ("tokens per group iteration", "", lambda t: t.tokens_per_iteration),
    ("tail idle", "share", lambda t: t.tail_idle_share),
)


def summary_table(runs: Sequence[RunData]) -> Markup:
    """A column a run, with the ratio to the first; an elastic run has a second one: if nobody had left."""
    columns: list[tuple[str, int, Totals, RunData | None]] = []
    for index, run in enumerate(runs):
        columns.append((run.name, index, totals(run), run))
        if run.is_elastic:
            columns.append(("if nobody had left", index, static_totals(run), None))
    head = [_run_head(name, index, is_what_if=run is None) for name, index, _, run in columns]
    first = columns[0][2]
    rows = [_plain_row("rollout steps", [str(t.num_steps) if run else "" for _, _, t, run in columns])]
    rows += [_figure_row(row, [t for _, _, t, _ in columns], first) for row in _FIGURES]
    rows += _count_rows([run for _, _, _, run in columns])
    rewards = ["" if run is None else _shown(t.reward) for _, _, t, run in columns]
    rows.append(_plain_row("reward, mean of the last 5 steps", rewards))
    return _table(["", *head], rows, class_="figures")


def decision_table(runs: Sequence[RunData]) -> Markup:
    found = [
        (index, run, step, decision)
        for index, run in enumerate(runs)
        for step, schedule in sorted(run.schedules.items())
        for decision in schedule.decisions
    ]
    if not found:
        return tag("p", "No decision of a release policy is on record.", class_="note")
    rows = [_decision_row(*one) for one in found[:MOST_DECISIONS]]
    heads = [
        "run",
        "step",
        "at, s",
        "leave",
        "moves",
        "reason",
        "gain, s",
        "rest predicted, s",
        "realised, s",
    ]
    table = _table([*heads, "took, s", "outcome"], rows, class_="decisions")
    cut = len(found) - len(rows)
    more = tag("p", f"{cut} more are in the runs' schedule folders.", class_="note") if cut else ""
    return join(tag("div", table, class_="scroll"), more)


def calibration_table(runs: Sequence[RunData]) -> Markup:
    """The predictor's own error, a row a step."""
    found = [
        (index, run, step, schedule.calibration)
        for index, run in enumerate(runs)
        for step, schedule in sorted(run.schedules.items())
        if schedule.calibration
    ]
    if not found:
        return tag("p", "No calibration is on record.", class_="note")
    names = sorted({name for *_, numbers in found for name in numbers})
    rows = [
        tag("tr", _name_cell(run.name, index), _cell(step), *(_cell(_shown(numbers.get(n))) for n in names))
        for index, run, step, numbers in found
    ]
    heads = ["run", "step", *(name.replace("_", " ") for name in names)]
    return tag("div", _table(heads, rows, class_="compact"), class_="scroll")


def config_table(runs: Sequence[RunData]) -> Markup:
    """Keys in which the runs differ; of a single run nothing."""
    known = [run for run in runs if run.config]
    if len(known) < 2:
        return Markup("")
    keys = sorted({key for run in known for key in run.config})
    differing = [key for key in keys if len({run.config.get(key) for run in known}) > 1]
    rows = [
        tag("tr", tag("th", key, scope="row"), *(_cell(run.config.get(key, "-")) for run in known))
        for key in differing
    ]
    if not rows:
        return tag("p", "All settings are the same.", class_="note")
    heads = [_run_head(run.name, runs.index(run), is_what_if=False) for run in known]
    return tag("div", _table(["setting", *heads], rows, class_="compact"), class_="scroll")


def metrics_table(runs: Sequence[RunData]) -> Markup:
    means = [metric_means(run) for run in runs]
    names = sorted({name for one in means for name in one})
    rows = [
        tag("tr", tag("th", name, scope="row"), *(_cell(_shown(one.get(name))) for one in means))
        for name in names
    ]
    heads = [_run_head(run.name, index, is_what_if=False) for index, run in enumerate(runs)]
    return tag("div", _table(["mean over the steps", *heads], rows, class_="compact"), class_="scroll")


def fact_table(runs: Sequence[RunData]) -> Markup:
    facts = (
        ("directory", lambda run: str(run.folder)),
        ("steps on record", lambda run: f"{len(run.metrics)} of {run.config.get('num_steps', '?')}"),
        ("workers", lambda run: run.config.get("rollout.ep_size", "?")),
        ("membership", lambda run: run.config.get("membership.mode", "?")),
        ("floor", lambda run: run.config.get("membership.floor", "?")),
        ("placement", lambda run: run.config.get("scheduling.placement", "?")),
        ("model", lambda run: run.config.get("model.name", "?")),
        ("seed", lambda run: run.config.get("seed", "?")),
    )
    rows = [
        tag("tr", tag("th", name, scope="row"), *(_cell(fact(run), class_="path") for run in runs))
        for name, fact in facts
    ]
    heads = [_run_head(run.name, index, is_what_if=False) for index, run in enumerate(runs)]
    return tag("div", _table(["", *heads], rows, class_="compact"), class_="scroll")


def run_mark(name: str, index: int) -> Markup:
    """A run's name behind its colour."""
    return join(tag("span", class_=f"mark c{index % 8}"), tag("span", name))


def _figure_row(row: _Row, columns: Sequence[Totals], first: Totals) -> Markup:
    name, unit, of = row
    label = join(name, tag("span", f" {unit}", class_="unit") if unit else "")
    # A ratio of shares says nothing.
    cells = [
        _figure(of(one), of(first), is_first=index == 0 or unit == "share")
        for index, one in enumerate(columns)
    ]
    return tag("tr", tag("th", label, scope="row"), *cells)


def _figure(value: float | None, first: float | None, *, is_first: bool) -> Markup:
    compared = None if is_first else ratio(value, first)
    return _cell(
        join(_shown(value), tag("span", "" if compared is None else f"x {compared:.3g}", class_="ratio"))
    )


def _count_rows(columns: Sequence[RunData | None]) -> list[Markup]:
    found = [None if run is None else counts(run) for run in columns]
    names = (
        ("membership switches", "num_switches"),
        ("decisions refused", "num_refused"),
        ("responses moved", "num_moves"),
        ("retractions", "num_retractions"),
    )
    return [
        _plain_row(label, ["" if one is None else _shown(getattr(one, name)) for one in found])
        for label, name in names
    ]


def _decision_row(index: int, run: RunData, step: int, decision: DecisionRecord) -> Markup:
    is_done = decision.outcome == "done"
    return tag(
        "tr",
        _name_cell(run.name, index),
        _cell(step),
        _cell(f"{decision.at_s:.1f}"),
        _cell(_ranks(decision.leavers), class_="text"),
        _cell(len(decision.moves)),
        _cell(decision.reason, class_="text reason"),
        _cell(f"{decision.predicted_gain_s:.1f}"),
        _cell(f"{decision.predicted_remaining_s:.1f}"),
        _cell(f"{decision.realised_remaining_s:.1f}"),
        _cell("-" if decision.took_s is None else f"{decision.took_s:.2f}"),
        _cell(decision.outcome, class_="text" if is_done else "text refused"),
    )


def _ranks(ranks: Sequence[int]) -> str:
    """Workers in order, runs of neighbours as `3-7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _run_head(name: str, index: int, *, is_what_if: bool) -> Markup:
    return tag("em", name) if is_what_if else run_mark(name, index)


def _name_cell(name: str, index: int) -> Markup:
    return tag("td", run_mark(name, index), class_="text run-name")


def _plain_row(label: str, values: Sequence[str]) -> Markup:
    no_ratio = tag("span", class_="ratio")
    return tag("tr", tag("th", label, scope="row"), *(_cell(join(value, no_ratio)) for value in values))


def _cell(value: Part, class_: str | None = None) -> Markup:
    return tag("td", value, class_=class_)


def _shown(value: float | None) -> str:
    return "-" if value is None else short(value)


def _table(heads: Sequence[Part], rows: Sequence[Markup], *, class_: str) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", one, scope="col") for one in heads)))
    return tag("table", head, tag("tbody", *rows), class_=class_)
