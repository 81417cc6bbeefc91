"""What a person sees while a run goes on: a bar per phase, a line per step, a table at the end.

On a terminal the bars move; into a file or a pipe a long phase writes a line now and then instead.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

LINE_INTERVAL_S = 20.0
"""Without a terminal, a phase that takes longer reports so often."""


class Advance(Protocol):
    """Reports progress of a phase: `done` of its total, with an optional note behind the bar."""

    def __call__(self, done: int, note: str = "") -> None: ...


class RunConsole:
    """Everything a run prints. `progress=False` leaves the bars and the lines in their place out."""

    def __init__(
        self,
        *,
        progress: bool,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._progress = progress
        self._clock = clock

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    @contextmanager
    def phase(self, name: str, total: int | None) -> Iterator[Advance]:
        """A bar that lives as long as the phase. `total=None` shows a spinner."""
        if not (self._progress and self._console.is_terminal):
            yield self._lines(name, total) if self._progress else _silent
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self._console, transient=True) as bars:
            task = bars.add_task(name, total=total, note="")

            def advance(done: int, note: str = "") -> None:
                bars.update(task, completed=done, note=note)

            yield advance

    def _lines(self, name: str, total: int | None) -> Advance:
        next_s = self._clock() + LINE_INTERVAL_S

        def advance(done: int, note: str = "") -> None:
            nonlocal next_s
            if self._clock() >= next_s:
                next_s = self._clock() + LINE_INTERVAL_S
                self.say(f"{name} {done}/{total} {note}".rstrip())

        return advance

    def step_line(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """The line of one rollout step: reward, length, tail idle, seconds per phase."""
        self.say(format_step(step, num_steps, metrics))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(title=title, title_justify="left", title_style="bold")
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)


def _silent(done: int, note: str = "") -> None:
    return None


def format_step(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    value = metrics.__getitem__
    return (
        f"step {step + 1:>3}/{num_steps}  reward {value('reward/mean'):.3f}  "
        f"length {value('length/mean_tokens'):.0f} (p99 {value('length/p99_tokens'):.0f})  "
        f"tail idle {100 * value('occupancy/tail_idle_share'):.0f} %  "
        f"rollout {value('time/rollout_s'):.1f} s  train {value('time/train_s'):.1f} s  "
        f"sync {value('time/sync_s'):.2f} s"
    )


_NOT_IN_EVERY_RUN = ("schedule/", "logprobs/", "train/logprob_s")


def _mean(records: Sequence[Mapping[str, Any]], name: str) -> float:
    values = [record[name] for record in records if record.get(name) is not None]
    return sum(values) / len(values) if values else float("nan")


def summary_rows(records: Sequence[Mapping[str, Any]], *, edge_steps: int = 5) -> list[tuple[str, ...]]:
    """Rows of the closing table: name, mean of the first steps, of the last ones, of all."""
    first, last = records[:edge_steps], records[-edge_steps:]
    rows = [
        ("reward", "reward/mean", "{:.3f}"),
        ("response tokens (mean)", "length/mean_tokens", "{:.1f}"),
        ("response tokens (p99 / median)", "length/p99_over_median", "{:.1f}"),
        ("tail idle, share of worker time", "occupancy/tail_idle_share", "{:.3f}"),
        ("worker-iterations", "occupancy/worker_iterations", "{:.0f}"),
        ("tokens per worker-iteration", "occupancy/tokens_per_worker_iteration", "{:.2f}"),
        ("tokens per occupied worker-second", "occupancy/tokens_per_occupied_worker_s", "{:.1f}"),
        ("rollout tokens per second", "occupancy/throughput_tokens_per_s", "{:.1f}"),
        ("responses moved", "schedule/num_moves", "{:.1f}"),
        ("share of steps in length buckets", "schedule/is_bucketed", "{:.2f}"),
        ("rollout seconds", "time/rollout_s", "{:.2f}"),
        ("train seconds", "time/train_s", "{:.2f}"),
        ("of them for logprobs", "train/logprob_s", "{:.2f}"),
        ("logprob seconds in the rollout", "logprobs/saved_s", "{:.2f}"),
        ("logprob seconds after the rollout", "logprobs/late_s", "{:.2f}"),
        ("weight sync seconds", "time/sync_s", "{:.2f}"),
    ]
    return [
        (label, *(form.format(_mean(part, name)) for part in (first, last, records)))
        for label, name, form in rows
        # Runs of earlier versions, or with another use of released workers, lack these.
        if not name.startswith(_NOT_IN_EVERY_RUN) or all(name in record for record in records)
    ]


def occupation_rows(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of the second table: what a static group would have been occupied for, what was, their ratio."""
    pairs = [
        ("worker-iterations", "occupancy/static_worker_iterations", "occupancy/worker_iterations"),
        ("occupied worker seconds", "occupancy/static_occupied_worker_s", "occupancy/occupied_worker_s"),
    ]
    tokens = _sum(records, "occupancy/num_tokens")
    rows: list[tuple[str, ...]] = []
    for label, static_name, name in pairs:
        static, own = _sum(records, static_name), _sum(records, name)
        rows.append((label, f"{static:.0f}", f"{own:.0f}", _ratio(own, static)))
        per_static, per_own = _share(tokens, static), _share(tokens, own)
        ratio = _ratio(per_own, per_static)
        rows.append((f"tokens per {label[:-1]}", f"{per_static:.2f}", f"{per_own:.2f}", ratio))
    static, own = (_mean(records, f"occupancy/{name}tail_idle_share") for name in ("static_", ""))
    rows.append(("tail idle, share of worker time", f"{static:.3f}", f"{own:.3f}", _ratio(own, static)))
    return rows


def _sum(records: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(record.get(name) or 0.0 for record in records)


def _share(amount: float, of: float) -> float:
    return amount / of if of else float("nan")


def _ratio(own: float, static: float) -> str:
    return f"{_share(own, static):.3f}"
