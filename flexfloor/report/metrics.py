"""Where a run's numbers go: `metrics.jsonl` always, TensorBoard and Weights & Biases by config.

One record a rollout step: a flat mapping of `group/name_unit` to a number, with `rollout_step`. Each line is
flushed as it is written, so the file is readable after a crash at any point.
"""

import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

from flexfloor.config import LoggingConfig
from flexfloor.masking import masked

METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """Takes the numbers of one rollout step."""

    def write(self, rollout_step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, rollout_step: int, metrics: Mapping[str, float]) -> None:
        record = {"rollout_step": rollout_step, **{name: _plain(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps that a run before this one has drawn already are shown once.
        purge = first_step if folder.exists() else None
        self._writer: Any = SummaryWriter(log_dir=str(folder), purge_step=purge)

    def write(self, rollout_step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if _plain(value) is not None:
                self._writer.add_scalar(name, value, rollout_step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=project, dir=str(folder), config=masked(config), name=folder.name)

    def write(self, rollout_step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=rollout_step)

    def close(self) -> None:
        self._run.finish()


class MetricsLog:
    """All sinks of a run, written together and closed together."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    @classmethod
    def open(
        cls, run_dir: Path, logging: LoggingConfig, config: Mapping[str, Any], *, first_step: int = 0
    ) -> Self:
        """`first_step`: what is there of this and later steps is of a run that this one goes on with."""
        sinks: list[Sink] = [JsonlSink(run_dir / METRICS_FILE)]
        if logging.tensorboard:
            sinks.append(TensorBoardSink(run_dir / "tensorboard", first_step))
        if logging.wandb_project is not None:
            sinks.append(WandbSink(logging.wandb_project, run_dir, config))
        return cls(sinks)

    def write(self, rollout_step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(rollout_step, metrics)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            sink.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run in step order; a torn last line (the run was killed) is left out."""
    return _records((run_dir / METRICS_FILE).read_text(encoding="utf-8"))


def whole_records(path: Path) -> list[dict[str, Any]]:
    """The same of any such file; nothing where there is none."""
    return _records(path.read_text(encoding="utf-8")) if path.exists() else []


def _records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.split("\n")[:-1] if line]


def _plain(value: float) -> float | None:
    """JSON has no NaN: a number that does not exist is null."""
    return value if math.isfinite(value) else None
