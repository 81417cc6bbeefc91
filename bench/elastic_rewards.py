"""Is learning the same over elastic membership? The same runs with a static and an elastic group, by step.

    python bench/elastic_rewards.py [--seeds 0 1 2] [--num-steps 6] [--folder FOLDER] [OVERRIDE ...]

Temperature 1, a sampling seed per response, weights changing every step. Float sums in another order may tip
a draw, which then changes the weights of every later step; so the first step that differs is told, and how
many responses of it do. A run whose folder holds all its steps is read, not repeated. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from flexfloor.report.metrics import METRICS_FILE, read_metrics
from flexfloor.rollout.ledger import read_ledger, step_path

MODES = ("static", "elastic")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num-steps", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("runs/elastic_rewards"))
    options, overrides = parser.parse_known_args()
    rows = [compared(options, seed, overrides) for seed in options.seeds]
    print(f"{'seed':>4} {'step':>4} {'static':>8} {'elastic':>8} {'other responses':>16}", file=sys.stderr)
    for row in rows:
        for step, (static, elastic, other) in enumerate(row["steps"]):
            print(f"{row['seed']:>4} {step:>4} {static:>8.4f} {elastic:>8.4f} {other:>16}", file=sys.stderr)
    static, elastic = (sum(row[f"{mode}_worker_iterations"] for row in rows) for mode in MODES)
    steps = [step for row in rows for step in row["steps"]]
    result = {
        "bench": "elastic_rewards",
        "seeds": options.seeds,
        "num_steps": options.num_steps,
        "steps_identical": sum(other == 0 for _, _, other in steps),
        "steps_compared": len(steps),
        "first_other_step_by_seed": {str(row["seed"]): row["first_other_step"] for row in rows},
        "mean_reward_difference": round(sum(b - a for a, b, _ in steps) / len(steps), 5),
        "max_abs_reward_difference": round(max(abs(b - a) for a, b, _ in steps), 5),
        "static_worker_iterations": static,
        "elastic_worker_iterations": elastic,
        "tokens_per_worker_iteration_ratio": round(
            sum(row["elastic_tokens"] for row in rows)
            / elastic
            / (sum(row["static_tokens"] for row in rows) / static),
            4,
        ),
        "overrides": overrides,
    }
    print(json.dumps(result))
    return 0


def compared(options: argparse.Namespace, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Both runs of one seed: rewards and differing responses per step, and the worker-iterations."""
    folders = {mode: run(options, mode, seed, overrides) for mode in MODES}
    records = {mode: read_metrics(folder) for mode, folder in folders.items()}
    drawn = {
        mode: [tokens(folder, step) for step in range(options.num_steps)] for mode, folder in folders.items()
    }
    steps = []
    for step in range(options.num_steps):
        static, elastic = (drawn[mode][step] for mode in MODES)
        other = sum(static[name] != elastic[name] for name in static)
        steps.append((*(records[mode][step]["reward/mean"] for mode in MODES), other))
    found: dict[str, Any] = {
        "seed": seed,
        "steps": steps,
        "first_other_step": next((step for step, row in enumerate(steps) if row[2]), None),
    }
    for mode in MODES:
        found[f"{mode}_worker_iterations"] = sum(
            record["occupancy/worker_iterations"] for record in records[mode]
        )
        found[f"{mode}_tokens"] = sum(record["occupancy/num_tokens"] for record in records[mode])
    return found


def run(options: argparse.Namespace, mode: str, seed: int, overrides: list[str]) -> Path:
    """The run's folder, after it has run to its end."""
    run_dir = (options.folder / f"{mode}-{seed}").resolve()
    if (run_dir / METRICS_FILE).exists() and len(read_metrics(run_dir)) == options.num_steps:
        return run_dir
    argv = [sys.executable, "-m", "flexfloor.cli.train", "experiment=quickstart", f"membership={mode}"]
    argv += [
        f"seed={seed}",
        f"num_steps={options.num_steps}",
        f"run_dir={run_dir}",
        f"hydra.run.dir={run_dir}",
    ]
    subprocess.run([*argv, *overrides], check=True, stdout=sys.stderr)
    return run_dir


def tokens(run_dir: Path, step: int) -> dict[str, tuple[int, ...]]:
    """What every response of a step is, by response_id."""
    state = read_ledger(step_path(run_dir / "ledger", step)).state
    return {name: tuple(known.token_ids) for name, known in state.responses.items()}


if __name__ == "__main__":
    sys.exit(main())
