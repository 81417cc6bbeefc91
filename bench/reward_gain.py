"""Does the quickstart learn? Reward of the last steps minus the first, over seeds, beside a run that cannot.

    python bench/reward_gain.py [--seeds 0 1 2] [--control-seed 0] [--folder runs/reward_gain] [OVERRIDE ...]

Every run is `flexfloor-train experiment=quickstart` with the overrides; the control has learning rate 0. A
run whose folder holds all its steps is read, not repeated. The last line is one JSON object.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from flexfloor.report.metrics import METRICS_FILE, read_metrics

EDGE_STEPS = 5


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--control-seed", type=int, default=0)
    parser.add_argument("--num-steps", type=int, default=25)
    parser.add_argument("--folder", type=Path, default=Path("runs/reward_gain"))
    options, overrides = parser.parse_known_args()
    overrides = [f"num_steps={options.num_steps}", *overrides]
    gains = {}
    for seed in options.seeds:
        gains[seed] = gain(options, f"seed-{seed}", [f"seed={seed}", *overrides])
    control = [f"seed={options.control_seed}", "trainer.learning_rate=0.0", *overrides]
    drift = gain(options, f"control-{options.control_seed}", control)
    print(
        json.dumps(
            {
                "num_steps": options.num_steps,
                "reward_gain_by_seed": {str(seed): round(value, 4) for seed, value in gains.items()},
                "reward_gain_min": round(min(gains.values()), 4) if gains else None,
                "control_reward_drift": round(drift, 4),
                "overrides": overrides,
            }
        )
    )
    return 0


def gain(options: argparse.Namespace, name: str, overrides: list[str]) -> float:
    """Mean reward of the last steps minus that of the first ones."""
    run_dir = (options.folder / name).resolve()
    if not is_complete(run_dir, options.num_steps):
        argv = [sys.executable, "-m", "flexfloor.cli.train", "experiment=quickstart", *overrides]
        argv += [f"run_dir={run_dir}", f"hydra.run.dir={run_dir}"]
        subprocess.run(argv, check=True)
    rewards = [record["reward/mean"] for record in read_metrics(run_dir)]
    first, last = (sum(part) / EDGE_STEPS for part in (rewards[:EDGE_STEPS], rewards[-EDGE_STEPS:]))
    print(f"{name}: first {EDGE_STEPS} steps {first:.4f}, last {EDGE_STEPS} steps {last:.4f}", flush=True)
    return last - first


def is_complete(run_dir: Path, num_steps: int) -> bool:
    return (run_dir / METRICS_FILE).exists() and len(read_metrics(run_dir)) == num_steps


if __name__ == "__main__":
    sys.exit(main())
