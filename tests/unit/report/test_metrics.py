"""Numbers survive a crash, and what a person sees is made of the very records."""

import io
import json
import math
from pathlib import Path

from rich.console import Console

from flexfloor.config import LoggingConfig
from flexfloor.report.console import RunConsole, format_step, occupation_rows, summary_rows
from flexfloor.report.metrics import METRICS_FILE, MetricsLog, read_metrics

LOGGING = LoggingConfig(tensorboard=False)


def record(reward: float) -> dict[str, float]:
    return {
        "reward/mean": reward,
        "length/mean_tokens": 20.4,
        "length/p99_tokens": 99.0,
        "length/p99_over_median": 8.0,
        "occupancy/tail_idle_share": 0.254,
        "occupancy/worker_iterations": 800,
        "time/rollout_s": 5.04,
        "time/train_s": 2.0,
        "time/sync_s": 0.126,
    }


def test_records_are_on_disk_as_soon_as_they_are_written(tmp_path: Path) -> None:
    with MetricsLog.open(tmp_path, LOGGING, {}) as metrics:
        metrics.write(0, record(0.5))
        assert read_metrics(tmp_path) == [{"rollout_step": 0, **record(0.5)}]
        metrics.write(1, record(0.75))
    assert [line["reward/mean"] for line in read_metrics(tmp_path)] == [0.5, 0.75]


def test_a_torn_last_record_is_left_out(tmp_path: Path) -> None:
    whole = json.dumps({"rollout_step": 0, "reward/mean": 1.0}) + "\n"
    (tmp_path / METRICS_FILE).write_text(whole + whole[:20])
    assert read_metrics(tmp_path) == [{"rollout_step": 0, "reward/mean": 1.0}]


def test_a_number_that_does_not_exist_is_null(tmp_path: Path) -> None:
    with MetricsLog.open(tmp_path, LOGGING, {}) as metrics:
        metrics.write(0, {"train/kl": math.nan})
    assert read_metrics(tmp_path) == [{"rollout_step": 0, "train/kl": None}]


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog.open(tmp_path, LoggingConfig(tensorboard=True), {}) as metrics:
        metrics.write(3, {"reward/mean": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward/mean")
    assert [(event.step, event.value) for event in events] == [(3, 0.25)]


def test_the_line_of_a_step() -> None:
    assert format_step(2, 30, record(0.6875)) == (
        "step   3/30  reward 0.688  length 20 (p99 99)  tail idle 25 %  "
        "rollout 5.0 s  train 2.0 s  sync 0.13 s"
    )


def test_the_summary_compares_first_and_last_steps() -> None:
    records = [record(reward) for reward in (0.1, 0.2, 0.3, 0.4)]
    rows = {label: values for label, *values in summary_rows(records, edge_steps=2)}
    assert rows["reward"] == ["0.150", "0.350", "0.250"]
    assert rows["worker-iterations"] == ["800", "800", "800"]
    assert rows["tokens per worker-iteration"] == ["nan", "nan", "nan"]


def occupation(tokens: int, iterations: tuple[int, int], seconds: tuple[float, float]) -> dict[str, float]:
    """`iterations` and `seconds`: of a static group and the group's own."""
    return {
        "occupancy/num_tokens": tokens,
        "occupancy/static_worker_iterations": iterations[0],
        "occupancy/worker_iterations": iterations[1],
        "occupancy/static_occupied_worker_s": seconds[0],
        "occupancy/occupied_worker_s": seconds[1],
        "occupancy/static_tail_idle_share": 0.5,
        "occupancy/tail_idle_share": 0.2,
    }


def test_occupation_is_compared_with_a_static_group_over_all_steps() -> None:
    records = [occupation(300, (100, 60), (40.0, 20.0)), occupation(900, (300, 140), (80.0, 40.0))]
    assert occupation_rows(records) == [
        ("worker-iterations", "400", "200", "0.500"),
        ("tokens per worker-iteration", "3.00", "6.00", "2.000"),
        ("occupied worker seconds", "120", "60", "0.500"),
        ("tokens per occupied worker second", "10.00", "20.00", "2.000"),
        ("tail idle, share of worker time", "0.500", "0.200", "0.400"),
    ]


def test_occupation_without_counters_is_no_number_and_no_failure() -> None:
    figures = {**occupation(300, (0, 0), (40.0, 20.0)), "occupancy/worker_iterations": None}
    rows = {label: values for label, *values in occupation_rows([figures])}
    assert rows["worker-iterations"] == ["0", "0", "nan"]
    assert rows["tokens per worker-iteration"] == ["nan", "nan", "nan"]
    assert rows["occupied worker seconds"] == ["40", "20", "0.500"]
    assert {value for row in occupation_rows([]) for value in row[1:]} == {"0", "nan"}


def test_into_a_file_a_long_phase_writes_a_line_now_and_then_and_no_bar() -> None:
    written, now_s = io.StringIO(), [0.0]
    console = RunConsole(progress=True, console=Console(file=written, width=80), clock=lambda: now_s[0])
    with console.phase("warm-up", 10) as advance:
        for done in range(1, 10):
            now_s[0] = 5.0 * done
            advance(done, f"loss {done}")
    console.say("a [line] as it is")
    assert written.getvalue() == "warm-up 4/10 loss 4\nwarm-up 8/10 loss 8\na [line] as it is\n"
