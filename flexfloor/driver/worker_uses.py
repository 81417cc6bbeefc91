"""Which use of released workers a step has, by the `release` group."""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from flexfloor.config import TrainConfig
from flexfloor.config.checks import require
from flexfloor.config.choices import ReleaseUse
from flexfloor.release.command import CommandUse
from flexfloor.release.slurm import SlurmUse, run_command
from flexfloor.release.use import Exit, Park, WorkerUse

JOB_VARIABLE = "SLURM_JOB_ID"
_TOOLS = ("scontrol", "squeue")


def check_worker_use(config: TrainConfig, environment: Mapping[str, str]) -> None:
    """Refuse a use that cannot work where this run is; ConfigError names the key and the fix."""
    if config.release.use is not ReleaseUse.slurm:
        return
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    problem = f"{JOB_VARIABLE} is not set: this is no SLURM job"
    if missing:
        problem = f"{' and '.join(missing)} cannot be found"
    holds = bool(environment.get(JOB_VARIABLE)) and not missing
    fix = "submit the run with sbatch (scripts/train.sbatch), or choose release=exit"
    require(holds, "release.use", "slurm", problem, fix)


def worker_use(config: TrainConfig, environment: Mapping[str, str], *, is_last_step: bool) -> WorkerUse:
    """A fresh one for a step.

    Workers that end do so in the last step. Before it they park, for they are needed again, unless
    `release.every_step` has the server started anew.
    """
    release = config.release
    log_path = Path(config.run_dir) / "logs" / "release_command.log"
    match release.use:
        case ReleaseUse.command:
            return CommandUse(release.command, timeout_s=release.command_timeout_s, log_path=log_path)
        case ReleaseUse.exit if is_last_step or release.every_step:
            return Exit()
        case ReleaseUse.slurm if is_last_step:
            return SlurmUse(environment[JOB_VARIABLE], partial(run_command, folder=Path(config.run_dir)))
        case _:
            return Park()
