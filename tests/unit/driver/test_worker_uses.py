"""Which use a step has, and where none can work."""

from pathlib import Path

import pytest

from flexfloor.cli.compose import compose, to_train_config
from flexfloor.config import TrainConfig
from flexfloor.driver.worker_uses import check_worker_use, worker_use
from flexfloor.errors import ConfigError
from flexfloor.release.command import CommandUse
from flexfloor.release.slurm import SlurmUse
from flexfloor.release.use import Exit, Park

JOB = {"SLURM_JOB_ID": "17"}


def config_of(tmp_path: Path, *release: str) -> TrainConfig:
    overrides = ["experiment=quickstart", "membership=elastic", f"run_dir={tmp_path}", *release]
    return to_train_config(compose(overrides))


@pytest.mark.parametrize(
    ("release", "before", "last"),
    [
        (["release=park"], Park, Park),
        (["release=exit"], Park, Exit),
        (["release=exit", "release.every_step=true"], Exit, Exit),
        (["release=slurm"], Park, SlurmUse),
        (["release=command", "release.command=[true]"], CommandUse, CommandUse),
    ],
)
def test_workers_end_when_nobody_needs_them_any_more(
    tmp_path: Path, release: list[str], before: type, last: type
) -> None:
    config = config_of(tmp_path, *release)
    assert type(worker_use(config, JOB, is_last_step=False)) is before
    assert type(worker_use(config, JOB, is_last_step=True)) is last


def test_slurm_needs_a_job_and_its_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, "release=slurm")
    for tool in ("scontrol", "squeue"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    check_worker_use(config, JOB)
    with pytest.raises(
        ConfigError, match=r"release\.use='slurm': SLURM_JOB_ID is not set: this is no SLURM job"
    ):
        check_worker_use(config, {})
    (tmp_path / "squeue").unlink()
    with pytest.raises(ConfigError, match=r"release\.use='slurm': squeue cannot be found"):
        check_worker_use(config, JOB)
    check_worker_use(config_of(tmp_path, "release=exit"), {})
