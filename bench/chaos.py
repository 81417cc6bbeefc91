"""Kills in a running RL job, and whether it comes to what it would have come to without them.

    python bench/chaos.py [--kills 60] [--seed 0] [--folder FOLDER] [OVERRIDE ...]

A small `flexfloor-train` on real SGLang (4 ranks, floor 1) and a real trainer goes through once
undisturbed: the oracle. A second one is hit: ranks by kill -9 and SIGSTOP while decoding, in prefill, in
the gather, in a switch, in a recovery, in a weight update, parked, or at any time; the server's main
process, a rank of the trainer, and the driver, in each phase of a step. `flexfloor-train resume=RUN`
follows where the run ends. Ranks at named points end by the server's own fault points, whose file is gone
when the fault has hit; all others are killed from outside, and what was seen of the phase then is in the
row. An injection that has not hit is no kill.

`wrong_tokens`: positions at which a response differs from the oracle's; float32, own seeds. `recovery_s_*`:
of the membership manager, from the detection of a lost rank to the last survivor in the new group. For
other classes the table tells seconds from the kill to the next recorded step. The last line is JSON.
"""

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "tests" / "integration" / room) for room in ("driver", "faults")]

from chaos_plan import KINDS, SURE, again, plan, quotas
from chaos_run import ChaosRun, Hit
from job import SMALL, running_job
from same_run import differences, lost_or_twice

from flexfloor.report.metrics import read_metrics
from flexfloor.rollout.ledger import read_ledger, step_path

ORACLE_STEP_LIMIT_S = 300.0


def main() -> int:
    options, overrides = _parser().parse_known_args()
    # The job runs in a session of its own and would outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"folder: {folder}", file=sys.stderr)
    steps = plan(options.kills, options.seed)
    # A step at the start in which nothing happens, and some at the end for what has missed.
    num_steps = 3 + len(steps) + len(steps) // 4
    arguments = [*SMALL, f"num_steps={num_steps}", "save_hf=false", *overrides]
    oracle = _oracle(folder / "oracle", arguments, num_steps)
    with ExitStack() as stack:
        run = ChaosRun(folder / "chaos", arguments, num_steps)
        stack.callback(run.close)
        pending = deque(steps)
        for step in range(1, num_steps - 1):
            for hit in run.step(step, pending.popleft() if pending else []):
                print(json.dumps(hit.row()), file=sys.stderr, flush=True)
                # The sure one that comes with a repetition is not repeated itself.
                if not hit.has_hit and hit.injection.kind != SURE:
                    pending.append(again(hit.injection, step))
        run.finish()
    found = summary(options, run, oracle, num_steps)
    print(table(run.hits), file=sys.stderr)
    print(json.dumps(found))
    return 0 if found["responses_lost"] == found["wrong_tokens"] == found["hangs"] == 0 else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="a short path; kept afterwards")
    return parser


def _oracle(folder: Path, arguments: Sequence[str], num_steps: int) -> Path:
    run_dir = folder / "run"
    if (run_dir / "done").exists() and len(read_metrics(run_dir)) == num_steps:
        return run_dir
    # One of an earlier call with fewer or more steps.
    shutil.rmtree(folder, ignore_errors=True)
    with running_job(folder, arguments) as job:
        code = job.wait(600 + num_steps * ORACLE_STEP_LIMIT_S)
        if code != 0:
            raise SystemExit(f"the oracle ended with exit code {code}\n{job.text[-3000:]}")
    (run_dir / "done").touch()
    return run_dir


def summary(options: argparse.Namespace, run: ChaosRun, oracle: Path, num_steps: int) -> dict[str, Any]:
    hits = [hit for hit in run.hits if hit.has_hit]
    recovered = [record.recovery_s for record in run.recoveries.values() if record.lost]
    lost, twice = lost_or_twice(run.run_dir, num_steps)
    wanted = quotas(options.kills)
    num_hits = Counter(hit.injection.kind for hit in hits)
    return {
        "bench": "chaos",
        "seed": options.seed,
        "kills_asked": options.kills,
        "kills_injected": len(hits),
        "num_steps": num_steps,
        "responses_lost": lost,
        "responses_duplicated": twice,
        "wrong_tokens": wrong_tokens(oracle, run.run_dir, num_steps),
        "hangs": run.num_hangs,
        "recoveries": len(recovered),
        "recovery_s_median": round(statistics.median(recovered), 3) if recovered else None,
        "recovery_s_max": round(max(recovered), 3) if recovered else None,
        "kills_by_kind": {kind.name: num_hits[kind] for kind in KINDS},
        "kinds_below_their_share": [kind.name for kind in KINDS if num_hits[kind] < wanted[kind]],
        "ranks_lost": run.num_lost,
        "resumes": run.num_resumes,
        "differences": differences(oracle, run.run_dir, num_steps)[:3],
    }


def wrong_tokens(oracle: Path, run_dir: Path, num_steps: int) -> int:
    """Over all responses; one that is missing is counted as lost, not here."""
    wrong = 0
    for step in range(num_steps):
        states = [read_ledger(step_path(where / "ledger", step)).state for where in (oracle, run_dir)]
        first, second = ({one.response_id: one.token_ids for one in s.finished_responses()} for s in states)
        for name in first.keys() & second.keys():
            pairs = zip(first[name], second[name], strict=False)
            wrong += sum(a != b for a, b in pairs) + abs(len(first[name]) - len(second[name]))
    return wrong


def table(hits: Sequence[Hit]) -> str:
    """A line a kind: kills, and the time from the kill to the next recorded step."""
    lines = [f"{'kind':<24} {'asked':>5} {'hit':>4} {'next step s, median':>20} {'max':>6}"]
    for kind in KINDS:
        own = [hit for hit in hits if hit.injection.kind == kind]
        took = [hit.until_next_step_s for hit in own if hit.has_hit]
        if own:
            median, most = (statistics.median(took), max(took)) if took else (float("nan"), float("nan"))
            lines.append(f"{kind.name:<24} {len(own):>5} {len(took):>4} {median:>20.1f} {most:>6.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    started_s = time.monotonic()
    code = main()
    print(f"took {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    sys.exit(code)
