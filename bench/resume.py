"""Is a run that was killed and resumed the run that it would have been? The driver dies by kill -9.

    python bench/resume.py [--kills 10] [--num-steps 20] [--seed 0] [--folder FOLDER] [--size small]
                           [OVERRIDE ...]

One run goes through. Each of the others is killed once, at a point that the seed chooses: a step, and in it
the rollout, the train step, the weight sync, a save, or a moment by the clock; then its last record is torn,
and `flexfloor-train resume=RUN` takes it to its end. Each is compared with the one that went through: tokens
by response, rewards, and floats within 1e-4. Float32, temperature 1, own seeds. The last line is JSON.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).parents[1] / "tests" / "integration" / "driver"))
from job import SMALL, Job, resumed_job, running_job
from same_run import differences, lost_or_twice

from flexfloor.rollout.ledger import read_ledger, step_path

SIZES = {"quickstart": ["experiment=quickstart"], "small": SMALL}
CHECKPOINT_EVERY = 4
PHASES = ("rollout", "train", "sync", "save", "any")
STEP_LIMIT_S = 300.0
END_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where a driver is killed."""

    step: int
    phase: str
    delay_s: float


def main() -> int:
    options, overrides = _parser().parse_known_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="resume-"))
    arguments = [
        *SIZES[options.size],
        f"num_steps={options.num_steps}",
        f"trainer.checkpoint_every_steps={CHECKPOINT_EVERY}",
        "save_hf=false",
        *overrides,
    ]
    print(f"folder: {folder}", file=sys.stderr)
    through = _through(folder / "through", arguments, options.num_steps)
    draw = random.Random(options.seed)
    rows = []
    for number in range(options.kills):
        step, phase = draw.randrange(options.num_steps), PHASES[number % len(PHASES)]
        point = Point(step=step, phase=phase, delay_s=draw.uniform(0, 2))
        rows.append(_killed(folder / f"killed-{number}", arguments, point, through, options.num_steps))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps(_summary(options, rows, overrides)))
    return 0 if all(row["is_same"] for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="quickstart")
    return parser


def _through(folder: Path, arguments: Sequence[str], num_steps: int) -> Path:
    with running_job(folder, arguments) as job:
        _wait_end(job, num_steps)
    return job.run_dir


def _killed(
    folder: Path, arguments: Sequence[str], point: Point, through: Path, num_steps: int
) -> dict[str, Any]:
    with running_job(folder, arguments) as job:
        children = _wait_for(job, point)
        where = _where(job)
        job.kill()
    _wait_gone(children)
    torn = _tear(job.run_dir)
    started_s = time.monotonic()
    with resumed_job(folder) as job:
        _wait_end(job, num_steps)
    lost, twice = lost_or_twice(job.run_dir, num_steps)
    found = differences(through, job.run_dir, num_steps)
    return {
        "step": point.step,
        "phase": point.phase,
        "killed_at": where,
        "torn": torn,
        "is_same": not found,
        "differences": found[:3],
        "responses_lost": lost,
        "responses_duplicated": twice,
        "resume_s": round(time.monotonic() - started_s, 1),
        "story": [line for line in job.text.splitlines() if line.startswith("resume:")],
    }


def _wait_for(job: Job, point: Point) -> list[psutil.Process]:
    """Until the point is there; what runs below the driver then."""
    job.wait_for_steps(point.step)
    ledger = step_path(job.run_dir / "ledger", point.step)
    match point.phase:
        case "rollout":
            job.wait_until(lambda: ledger.exists() and _num_tokens(ledger) > 0)
        case "train":
            # The rollout is over and the step is not on record.
            job.wait_until(lambda: ledger.exists() and _is_whole(ledger))
        case "sync":
            # One at the start and one after every step.
            job.wait_until(lambda: _num_syncs(job)[0] >= point.step + 2 or job.num_steps() > point.step)
        case "save":
            job.wait_until(lambda: _is_saving(job) or _is_past(job, point))
        case _:
            time.sleep(point.delay_s)
    return job.descendants()


def _is_saving(job: Job) -> bool:
    return any((job.run_dir / "checkpoints").glob("*.partial"))


def _is_past(job: Job, point: Point) -> bool:
    """So late that no save is to be hoped for."""
    return job.num_steps() > point.step + CHECKPOINT_EVERY


def _num_syncs(job: Job) -> tuple[int, int]:
    """Weight updates that the server has begun, and ended."""
    path = job.run_dir / "logs" / "server.log"
    # Of a server that the run attaches to (cluster.server_url=...) nothing is known.
    log = path.read_text(errors="replace") if path.exists() else ""
    return log.count("POST /begin_weight_update"), log.count("POST /end_weight_update")


def _where(job: Job) -> dict[str, Any]:
    """What shows that the phase was hit."""
    step = job.num_steps()
    ledger = step_path(job.run_dir / "ledger", step)
    state = read_ledger(ledger).state if ledger.exists() else None
    begun, ended = _num_syncs(job)
    return {
        "steps_done": step,
        "responses_finished": 0 if state is None else state.num_finished,
        "responses": 0 if state is None or state.opened is None else state.opened.num_responses,
        "is_saving": _is_saving(job),
        "is_syncing": begun > ended,
    }


def _num_tokens(path: Path) -> int:
    return read_ledger(path).state.num_tokens


def _is_whole(path: Path) -> bool:
    state = read_ledger(path).state
    return state.opened is not None and state.num_finished == state.opened.num_responses


def _tear(run_dir: Path) -> str:
    """Half a record more in the newest ledger, as a power cut leaves it."""
    ledgers = sorted((run_dir / "ledger").glob("step-*.ledger"))
    if not ledgers:
        return ""
    with ledgers[-1].open("ab") as file:
        file.write(b"\x40\x00\x00")
    return ledgers[-1].name


def _wait_end(job: Job, num_steps: int) -> None:
    code = job.wait(600 + num_steps * STEP_LIMIT_S)
    if code != 0:
        raise SystemExit(f"{job.run_dir}: exit code {code}\n{job.text[-3000:]}")


def _wait_gone(processes: Sequence[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=END_LIMIT_S)
    if alive:
        raise SystemExit(f"{len(alive)} processes outlived their driver: {alive}")


def _summary(options: argparse.Namespace, rows: list[dict[str, Any]], overrides: list[str]) -> dict[str, Any]:
    return {
        "bench": "resume",
        "size": options.size,
        "num_steps": options.num_steps,
        "seed": options.seed,
        "overrides": overrides,
        "kills": len(rows),
        "same": sum(row["is_same"] for row in rows),
        "responses_lost": sum(row["responses_lost"] for row in rows),
        "responses_duplicated": sum(row["responses_duplicated"] for row in rows),
        "kills_by_phase": dict(Counter(row["phase"] for row in rows)),
        "in_mid_rollout": sum(
            0 < row["killed_at"]["responses_finished"] < row["killed_at"]["responses"] for row in rows
        ),
        "after_the_rollout": sum(
            0 < row["killed_at"]["responses_finished"] == row["killed_at"]["responses"] for row in rows
        ),
        "while_syncing": sum(row["killed_at"]["is_syncing"] for row in rows),
        "while_saving": sum(row["killed_at"]["is_saving"] for row in rows),
        "resume_s_median": sorted(row["resume_s"] for row in rows)[len(rows) // 2] if rows else None,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
