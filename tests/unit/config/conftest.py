import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flexfloor.cli import train
from flexfloor.cli.compose import compose, to_train_config
from flexfloor.config import TrainConfig

Change = Callable[[TrainConfig, dict[str, Any]], TrainConfig]


@dataclass
class Outcome:
    """What a command line did."""

    code: int
    out: str
    err: str
    configs: list[TrainConfig]
    """Configurations that reached the driver."""


class RecordingDriver(ModuleType):
    """Stands where flexfloor.driver stands: keeps what it is given, answers with the codes it was told."""

    def __init__(self) -> None:
        super().__init__("flexfloor.driver")
        self.configs: list[TrainConfig] = []
        self.answers: list[int | Exception] = []

    def run(self, config: TrainConfig) -> int:
        self.configs.append(config)
        answer = self.answers.pop(0) if self.answers else 0
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> RecordingDriver:
    recording = RecordingDriver()
    monkeypatch.setitem(sys.modules, "flexfloor.driver", recording)
    return recording


@pytest.fixture
def root_logging() -> Iterator[None]:
    """Hydra configures the root logger for a job."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def cli(
    driver: RecordingDriver,
    root_logging: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Outcome]:
    """The real console script's function, in an empty folder, with a driver that only records."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["flexfloor-train", *arguments])
        try:
            code = train.main()
        except SystemExit as stop:  # --help and argparse end the process
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return Outcome(code=code, out=out, err=err, configs=driver.configs)

    return call


@pytest.fixture(scope="session")
def quickstart() -> TrainConfig:
    return to_train_config(compose(["experiment=quickstart", "run_dir=runs/test"]))


@pytest.fixture(scope="session")
def change() -> Change:
    """A copy with dotted keys replaced: goes through every group's own rules again."""

    def changed(config: TrainConfig, values: dict[str, Any]) -> TrainConfig:
        by_group: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            group, _, name = key.rpartition(".")
            by_group.setdefault(group, {})[name] = value
        for group, fields in by_group.items():
            if group == "model.tiny":
                fields, group = {"tiny": replace(config.model.tiny, **fields)}, "model"
            config = replace(
                config, **({group: replace(getattr(config, group), **fields)} if group else fields)
            )
        return config

    return changed
