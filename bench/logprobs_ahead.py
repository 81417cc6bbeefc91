"""What `release=logprobs` saves after the rollout, and what it costs the rollout.

    python bench/logprobs_ahead.py [--pairs 2] [--steps 8]

Pairs of runs of flexfloor-train on one server of 4 ranks, release=park and release=logprobs with the same
seed, in alternating order. Both train with a reference model and four optimizer steps, so that there are
logprobs to compute. The first step of each run is left out: it warms up.

The last line is one JSON object: means over the steps, in seconds, and ratios logprobs / park. `train_s` is
all between the rollout and the weight sync: what is left of the logprobs is in it in both. On a CPU trainer
and rollout share the cores, so what is saved after the rollout may be paid in it: see `rollout_ratio`.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration" / "driver"))

from job import SHAPE, running_job
from shared_server import SharedServer
from sharp_model import sharp_tiny_moe

from flexfloor.processes import ChildProcesses
from flexfloor.report.metrics import read_metrics

TASK = (
    "experiment=quickstart",
    *SHAPE,
    "model.tiny.warmup_steps=0",
    "data.num_prompts=32",
    "data.reward=probe_rewards:share_of_digits",
    "rollout.num_prompt_groups=16",
    "rollout.num_responses_per_prompt=16",
    "rollout.max_response_tokens=96",
    "algorithm.kl_coef=0.001",
)
FIGURES = {
    "rollout_s": "time/rollout_s",
    "train_s": "time/train_s",
    "saved_s": "logprobs/saved_s",
    "late_s": "logprobs/late_s",
    "early_token_share": "logprobs/early_token_share",
    "own_logprob_s": "train/logprob_s",
}
JOB_TIMEOUT_S = 1200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"park": [], "logprobs": []}
    with tempfile.TemporaryDirectory() as folder, ChildProcesses() as children:
        root = Path(folder)
        server = SharedServer(children, sharp_tiny_moe(root / "model"), root / "server")
        attach = [
            f"cluster.server_url={server.wait_ready()}",
            f"membership.folder={server.membership_folder}",
        ]
        for pair in range(options.pairs):
            for use in ("park", "logprobs") if pair % 2 == 0 else ("logprobs", "park"):
                overrides = [*TASK, *attach, f"release={use}", f"seed={pair}", f"num_steps={options.steps}"]
                found[use] += run(root / f"{use}-{pair}", overrides)
    means = {use: mean_figures(records) for use, records in found.items()}
    print(json.dumps(figures(means, vars(options)), indent=None))


def run(folder: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """The records of one run's steps but the first."""
    with running_job(folder, overrides) as job:
        if job.wait(JOB_TIMEOUT_S) != 0:
            raise SystemExit(job.text)
        records = read_metrics(job.run_dir)[1:]
    print(json.dumps({"run": folder.name, **mean_figures(records)}), file=sys.stderr)
    return records


def mean_figures(records: list[dict[str, Any]]) -> dict[str, float]:
    return {
        name: round(statistics.fmean(record[metric] for record in records), 4)
        for name, metric in FIGURES.items()
        if metric in records[0]
    }


def figures(means: dict[str, dict[str, float]], options: dict[str, Any]) -> dict[str, Any]:
    park, logprobs = means["park"], means["logprobs"]
    return {
        **options,
        **means,
        "train_ratio": round(logprobs["train_s"] / park["train_s"], 4),
        "rollout_ratio": round(logprobs["rollout_s"] / park["rollout_s"], 4),
        "step_ratio": round(
            (logprobs["train_s"] + logprobs["rollout_s"]) / (park["train_s"] + park["rollout_s"]), 4
        ),
    }


if __name__ == "__main__":
    main()
