"""Where a run begins: at its first step, or, with `resume`, where its newest sound checkpoint stands.

newest checkpoint that is sound -> its step; none -> step 0 from the run's first weights
steps on record after that -> taken from their ledgers while the weights stay the same, see `recorded`
"""

import fcntl
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexfloor.config import TrainConfig
from flexfloor.config.checks import require
from flexfloor.config.resume_rules import config_digest
from flexfloor.driver.checkpoints import Checkpoint, Checkpoints
from flexfloor.driver.recorded import cut_metrics
from flexfloor.driver.scheduling import run_id
from flexfloor.errors import ConfigError
from flexfloor.report.metrics import METRICS_FILE, whole_records

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
IDENTITY_FILE = "run.json"
CHECKPOINTS = "checkpoints"
_LOCK_WAIT_S = 10.0
"""A driver that was killed is gone at once; what inherited from it may take a moment."""
_LOCK_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """Where a run begins, and what is on record beyond."""

    run_id: str
    """Of the run in the length history."""
    is_resume: bool = False
    first_step: int = 0
    checkpoint: Path | None = None
    weight_checksum: str | None = None
    """That the checkpoint's weights must have."""
    records: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    """Figures by step of what the run did before."""


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """One driver a run: the kernel gives the lock back however the holder ends.

    Raises ConfigError while another process has it.
    """
    with (run_dir / LOCK_FILE).open("w") as file:
        deadline_s = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline_s:
                    problem, fix = "another process is running it", "wait until it has ended, or end it"
                    raise ConfigError("run_dir", str(run_dir), problem, fix) from error
            time.sleep(_LOCK_POLL_S)
        yield


def run_start(config: TrainConfig, say: Callable[[str], None]) -> RunStart:
    """Decide it, and take later figures and plans off the record. Call with the lock held.

    Raises ConfigError where the run cannot go on as it was.
    """
    run_dir = Path(config.run_dir)
    identity = _identity(run_dir)
    if config.resume is None:
        return RunStart(run_id=identity)
    checkpoints = Checkpoints(run_dir / CHECKPOINTS, keep=config.trainer.checkpoint_keep)
    checkpoints.clean()
    found = checkpoints.newest(lambda problem: _tell_damage(problem, say))
    first_step = 0 if found is None else found.state.step
    _check(config, found)
    if found is None:
        say("resume: no checkpoint; from the first weights, over what is on record")
    else:
        say(
            f"resume: from {found.path}, {first_step} steps done, weight_version {found.state.weight_version}"
        )
    _restore_windows(run_dir / "schedule", config, found)
    return RunStart(
        run_id=identity if found is None else found.state.run_id,
        is_resume=True,
        first_step=first_step,
        checkpoint=None if found is None else found.path,
        weight_checksum=None if found is None else found.state.weight_checksum,
        records=cut_metrics(run_dir, first_step),
    )


def _identity(run_dir: Path) -> str:
    """The run's name in the length history, the same wherever its folder goes."""
    path = run_dir / IDENTITY_FILE
    if path.exists():
        return str(json.loads(path.read_text())["run_id"])
    name = run_id(run_dir)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"run_id": name}))
    part.replace(path)
    return name


def _check(config: TrainConfig, found: Checkpoint | None) -> None:
    done = 0 if found is None else found.state.step
    if not config.save_hf or (Path(config.run_dir) / "hf").exists():
        done = max(done, len(whole_records(Path(config.run_dir) / METRICS_FILE)))
    problem = f"the run has done {done} steps"
    fix = "set num_steps to more to train on"
    require(done < config.num_steps, "num_steps", config.num_steps, problem, fix)
    if found is None:
        return
    problem = f"{found.path} was made with other values in config.yaml than stand there now"
    same = found.state.config_digest == config_digest(config)
    require(same, "resume", config.resume, problem, "put the values back, or start a new run")


def _tell_damage(problem: str, say: Callable[[str], None]) -> None:
    logger.info("event=damaged_checkpoint %s", problem)
    say(f"resume: DAMAGED CHECKPOINT, passed over for the one before it: {problem}")


def _restore_windows(folder: Path, config: TrainConfig, found: Checkpoint | None) -> None:
    """Look-ahead windows as they stood: one that was planned later is planned again."""
    for path in folder.glob("window-*.json"):
        path.unlink()
    if found is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, plan in found.state.windows.items():
        part = folder / f"{name}.part"
        part.write_text(json.dumps(plan))
        part.replace(folder / name)
