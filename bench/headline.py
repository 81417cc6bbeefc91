"""What every lever of FlexFloor gives on real SGLang, 4 ranks on a CPU, priced with a model of an H200.

    python bench/headline.py [--traces study predictable] [--seeds 0 1 2] [--setups static guarded ...]
                             [--scale 64] [--num-steps 8] [--out FILE]

Every configuration draws the same prompts with the same forced lengths (bench/traces), under a warm history
of two passes. One token of the small model stands for `--scale` tokens of the modelled one: an iteration for
as many, context and prefill times that. What the ranks logged is then priced: seconds of 4 processes on a
few cores would reward any smaller group, so they are shown and not used. NOT run on GPUs.

Ratios are against `static` of the same trace and seed. The last line is one JSON object; raw rows of every
step go to `--out`.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration" / "sglang"))

from headline_runs import NUM_RANKS, SETUPS, Bench, ForcedTrace, RanStep
from server import start_server
from sharp_model import sharp_tiny_moe

from flexfloor.processes import ChildProcesses
from flexfloor.scheduling.clocks import NeutralClock, ScaledClock
from flexfloor.scheduling.cost import Clock
from flexfloor.scheduling.gpu_clock import H200, GpuClock
from flexfloor.scheduling.pricing import price

TRACES = Path(__file__).parent / "traces"
VOCABULARY = range(5, 17)
SWEPT = ("fixed_s", "hop_s", "weight_efficiency", "kv_efficiency", "per_response_s", "switch_fixed_s")
"""Constants of the clock that are halved and doubled, one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One configuration on one trace and seed, all steps together."""

    tokens_per_iteration: float
    tokens_per_worker_iteration: float
    modelled_tokens_per_occupied_s: float
    modelled_tokens_per_s: float
    neutral_tokens_per_occupied: float
    neutral_tokens_per_iteration: float
    measured_s: float
    """Of this machine, where a smaller group leaves more of the cores to each rank: flattering."""
    tail_idle: float
    num_switches: int
    num_moves: int
    num_retractions: int
    num_refused: int


def main() -> None:
    options = parse()
    clock = ScaledClock(clock=GpuClock(spec=H200), model_tokens_per_token=options.scale)
    raw: dict[str, list[RanStep]] = {}
    with tempfile.TemporaryDirectory() as folder, ChildProcesses() as children:
        bench = started(children, Path(folder), clock, options)
        for name in [f"{kind}-{seed}" for kind in options.traces for seed in options.seeds]:
            trace = ForcedTrace.read(TRACES / f"{name}.json", options.scale, VOCABULARY)
            for setup in options.setups:
                started_s = time.monotonic()
                raw[f"{name}/{setup}"] = bench.run(SETUPS[setup], trace)
                took_s = time.monotonic() - started_s
                figures = measured(raw[f"{name}/{setup}"], clock, options.scale)
                print(f"{name} {setup} took {took_s:.1f} s: {json.dumps(asdict(figures))}", file=sys.stderr)
    result = {
        "bench": "headline",
        "scale": options.scale,
        "num_steps": options.num_steps,
        "seeds": options.seeds,
        **{kind: of_trace(kind, raw, clock, options) for kind in options.traces},
    }
    if options.out:
        options.out.write_text(json.dumps({"result": result, "steps": as_rows(raw)}))
    print(json.dumps(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", nargs="+", default=["study", "predictable"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--setups", nargs="+", choices=list(SETUPS), default=list(SETUPS))
    parser.add_argument("--scale", type=int, default=64)
    parser.add_argument("--num-steps", type=int, default=8)
    parser.add_argument("--decision-interval-tokens", type=int, default=4)
    parser.add_argument("--collectives", choices=("gloo", "shm"), default="shm")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--timelines", type=Path, help="keep a picture of every step in this folder")
    options = parser.parse_args()
    if options.setups[0] != "static":
        parser.error("--setups must begin with static: the others are compared with it")
    return options


def started(children: ChildProcesses, root: Path, clock: Clock, options: argparse.Namespace) -> Bench:
    """A server of 4 ranks on a tiny random model; what it says does not matter, only for how long."""
    model = sharp_tiny_moe(root / "model")
    log = root / "iterations"
    flags = ["--flexfloor-membership", "elastic", "--flexfloor-folder", str(root / "membership")]
    flags += ["--flexfloor-collectives", options.collectives, "--flexfloor-iteration-log", str(log)]
    flags += ["--max-running-requests", "1024", "--stream-interval", "2", "--weight-version", "0"]
    server = start_server(children, model, NUM_RANKS, root / "server.log", flags)
    server.wait_ready(deadline_s=600)
    return Bench(
        url=server.url,
        membership_folder=root / "membership",
        iteration_log=log,
        clock=clock,
        decision_interval_tokens=options.decision_interval_tokens,
        seed=0,
        num_steps=options.num_steps,
        work_dir=root,
        timelines=options.timelines,
    )


def measured(steps: list[RanStep], clock: Clock, scale: int) -> Figures:
    """Rates in tokens of the modelled model; under the neutral clock an iteration is the unit of time."""
    tokens = sum(step.num_tokens for step in steps)
    iterations = sum(step.iterations.num_iterations for step in steps)
    worker_iterations = sum(step.iterations.worker_iterations for step in steps)
    priced = [price(step.iterations, clock, full_size=NUM_RANKS) for step in steps]
    neutral = [price(step.iterations, NeutralClock(), full_size=NUM_RANKS) for step in steps]
    return Figures(
        tokens_per_iteration=round(tokens / iterations, 4),
        tokens_per_worker_iteration=round(tokens / worker_iterations, 4),
        modelled_tokens_per_occupied_s=round(
            scale * tokens / sum(one.occupied_worker_s for one in priced), 2
        ),
        modelled_tokens_per_s=round(scale * tokens / sum(one.wall_s for one in priced), 2),
        neutral_tokens_per_occupied=round(tokens / sum(one.occupied_worker_s for one in neutral), 4),
        neutral_tokens_per_iteration=round(tokens / sum(one.wall_s for one in neutral), 4),
        measured_s=round(sum(step.wall_s for step in steps), 2),
        tail_idle=round(sum(step.iterations.idle_worker_iterations for step in steps) / worker_iterations, 4),
        num_switches=sum(step.iterations.num_switches for step in steps),
        num_moves=sum(step.num_moves for step in steps),
        num_retractions=sum(step.num_retractions for step in steps),
        num_refused=sum(step.num_refused for step in steps),
    )


def ratios(
    kind: str, setup: str, raw: dict[str, list[RanStep]], clock: Clock, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Of a configuration against static, seed by seed."""
    found = []
    for seed in options.seeds:
        own = measured(raw[f"{kind}-{seed}/{setup}"], clock, options.scale)
        base = measured(raw[f"{kind}-{seed}/static"], clock, options.scale)
        found.append(
            {
                "tokens_per_worker_iteration_ratio": own.tokens_per_worker_iteration
                / base.tokens_per_worker_iteration,
                "modelled_occupied_ratio": own.modelled_tokens_per_occupied_s
                / base.modelled_tokens_per_occupied_s,
                "modelled_throughput_ratio": own.modelled_tokens_per_s / base.modelled_tokens_per_s,
                "neutral_occupied_ratio": own.neutral_tokens_per_occupied / base.neutral_tokens_per_occupied,
                "neutral_throughput_ratio": own.neutral_tokens_per_iteration
                / base.neutral_tokens_per_iteration,
                "measured_s_ratio": own.measured_s / base.measured_s,
                "tail_idle": own.tail_idle,
                "num_switches": own.num_switches,
                "num_moves": own.num_moves,
                "num_retractions": own.num_retractions,
            }
        )
    return found


def middle(rows: list[dict[str, float]]) -> dict[str, float | list[float]]:
    """Median over seeds, and the smallest of the two ratios that matter."""
    values: dict[str, Any] = {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}
    for key in ("modelled_occupied_ratio", "modelled_throughput_ratio"):
        values[f"{key}_min"] = round(min(row[key] for row in rows), 4)
    return values


def of_trace(
    kind: str, raw: dict[str, list[RanStep]], clock: Clock, options: argparse.Namespace
) -> dict[str, Any]:
    by_setup = {setup: middle(ratios(kind, setup, raw, clock, options)) for setup in options.setups}
    print(table(kind, by_setup), file=sys.stderr)
    result: dict[str, Any] = {"baseline_tail_idle": by_setup["static"]["tail_idle"]}
    for setup, values in by_setup.items():
        result[setup] = values
    for profile in ("guarded", "auto", "eager", "max", "guarded_floor2"):
        if profile in by_setup:
            result[f"best_static_size_occupied_ratio_at_equal_throughput_{profile}"] = against_static_sizes(
                by_setup, profile
            )
            result[f"swept_constants_{profile}"] = swept(kind, profile, raw, options)
    return result


def against_static_sizes(by_setup: dict[str, dict[str, Any]], profile: str) -> float | None:
    """Occupied ratio over that of the smallest bucketed static group whose throughput is at least ours."""
    own = by_setup[profile]
    sizes = [name for name in ("half_bucketed", "bucketing") if name in by_setup]
    fast = [n for n in sizes if by_setup[n]["modelled_throughput_ratio"] >= own["modelled_throughput_ratio"]]
    if not fast:
        return None
    return float(round(own["modelled_occupied_ratio"] / by_setup[fast[0]]["modelled_occupied_ratio"], 4))


def swept(
    kind: str, profile: str, raw: dict[str, list[RanStep]], options: argparse.Namespace
) -> dict[str, list[float]]:
    """[occupied, throughput] ratio, median over seeds, of the same schedules under other constants."""
    found = {}
    for name in SWEPT:
        for factor in (0.5, 2.0):
            spec = H200.scaled(**{name: factor})
            clock = ScaledClock(clock=GpuClock(spec=spec), model_tokens_per_token=options.scale)
            row = middle(ratios(kind, profile, raw, clock, options))
            pair = (row["modelled_occupied_ratio"], row["modelled_throughput_ratio"])
            found[f"{name} x {factor:g}"] = [float(value) for value in pair]  # type: ignore[arg-type]
    return found


def table(kind: str, by_setup: dict[str, dict[str, Any]]) -> str:
    columns = ("modelled_occupied_ratio", "modelled_throughput_ratio", "tokens_per_worker_iteration_ratio")
    columns += ("measured_s_ratio", "tail_idle", "num_switches", "num_moves", "num_retractions")
    lines = [f"{kind:>14} " + " ".join(f"{name.replace('_ratio', '')[:20]:>20}" for name in columns)]
    for setup, values in by_setup.items():
        lines.append(f"{setup:>14} " + " ".join(f"{values[name]:>20}" for name in columns))
    return "\n".join(lines)


def as_rows(raw: dict[str, list[RanStep]]) -> dict[str, list[dict[str, Any]]]:
    """Per step, with its iterations as [repeats, members, running, most running, most context, prefill]."""
    return {name: [_row(step) for step in steps] for name, steps in raw.items()}


def _row(step: RanStep) -> dict[str, Any]:
    rows = step.iterations
    columns = (
        rows.is_member.sum(axis=1),
        rows.num_running.sum(axis=1),
        rows.num_running.max(axis=1),
        rows.context_tokens.max(axis=1),
        rows.prefill_tokens.max(axis=1),
    )
    return {
        "num_tokens": step.num_tokens,
        "wall_s": round(step.wall_s, 3),
        "num_moves": step.num_moves,
        "num_retractions": step.num_retractions,
        "decisions": step.decisions,
        "responses": step.lengths,
        "iteration_ms": [] if rows.seconds is None else [round(1e3 * value, 1) for value in rows.seconds],
        "members_running_most_context_prefill": [
            [int(value) for value in row] for row in zip(*columns, strict=True)
        ],
    }


if __name__ == "__main__":
    main()
