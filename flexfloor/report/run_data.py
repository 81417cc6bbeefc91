"""What a run directory holds for its report; what is missing or cannot be read is said, not guessed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from flexfloor.errors import FlexfloorError, LedgerError
from flexfloor.masking import masked
from flexfloor.report.metrics import METRICS_FILE, read_metrics
from flexfloor.report.step_story import LEDGER_FOLDER, StepStory, read_story
from flexfloor.schedule_record import StepSchedule, read_schedule

CONFIG_FILE = "config.yaml"
SCHEDULE_FOLDER = "schedule"


class RunDirectoryError(FlexfloorError, ValueError):
    """A folder that is no run directory; the text names it and what it lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """A run as far as it is on disk."""

    name: str
    folder: Path
    config: Mapping[str, str]
    """Every key in dotted form; empty where there is no readable config.yaml."""
    metrics: Sequence[Mapping[str, Any]]
    schedules: Mapping[int, StepSchedule]
    stories: Mapping[int, StepStory]
    """Of the chosen steps."""
    num_ledgers: int
    missing: Sequence[str]

    @property
    def is_elastic(self) -> bool:
        return self.config.get("membership.mode") == "elastic" or any(
            schedule.absences for schedule in self.schedules.values()
        )


def read_runs(folders: Sequence[Path], *, most_steps: int) -> list[RunData]:
    """The runs under the shortest names that tell them apart; of each the stories of `most_steps` steps.

    Raises RunDirectoryError for a folder that holds nothing of a run, ValueError for metrics that are
    damaged before their last line.
    """
    names = short_names(folders)
    return [_read_run(folder, name, most_steps) for folder, name in zip(folders, names, strict=True)]


def short_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes for all to differ."""
    paths = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, paths), default=0) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(folder) for folder in folders]


def chosen_steps(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly spread, with the first, the middle and the last."""
    if len(steps) <= most:
        return list(steps)
    last = len(steps) - 1
    places = [round(index * last / max(1, most - 1)) for index in range(most)]
    if most >= 3:
        places[most // 2] = last // 2
    return [steps[place] for place in sorted(set(places))]


def _read_run(folder: Path, name: str, most_steps: int) -> RunData:
    _check(folder)
    missing: list[str] = []
    schedules = _schedules(folder, missing)
    ledgers = {_step_of(path): path for path in sorted((folder / LEDGER_FOLDER).glob("step-*.ledger"))}
    if not ledgers:
        missing.append(f"{LEDGER_FOLDER}/: no ledgers, so no timelines and no lengths of single responses")
    config = _config(folder, missing)
    metrics = _metrics(folder, missing)
    num_ranks = _whole(config.get("rollout.ep_size"))
    stories = _stories(folder, chosen_steps(sorted(ledgers), most_steps), num_ranks, schedules, missing)
    if len(ledgers) > len(stories) > 0:
        missing.append(f"{len(stories)} of {len(ledgers)} ledgers are shown (--steps shows more)")
    return RunData(
        name=name,
        folder=folder,
        config=config,
        metrics=metrics,
        schedules=schedules,
        stories=stories,
        num_ledgers=len(ledgers),
        missing=missing,
    )


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise RunDirectoryError(f"{folder}: there is no such directory")
    if (folder / METRICS_FILE).exists() or any((folder / LEDGER_FOLDER).glob("step-*.ledger")):
        return
    below = sorted(path.parent.name for path in folder.glob(f"*/{METRICS_FILE}"))
    hint = f"; runs lie below it: {', '.join(below[:4])}" if below else ""
    raise RunDirectoryError(
        f"{folder}: not a run directory, it has neither {METRICS_FILE} nor "
        f"{LEDGER_FOLDER}/step-*.ledger{hint}"
    )


def _schedules(folder: Path, missing: list[str]) -> dict[int, StepSchedule]:
    schedules = {}
    for path in sorted((folder / SCHEDULE_FOLDER).glob("step-*.json")):
        try:
            schedule = read_schedule(path)
        except ValueError as error:
            missing.append(f"{SCHEDULE_FOLDER}/{path.name}: cannot be read ({error})")
            continue
        schedules[schedule.rollout_step] = schedule
    if not schedules:
        lacks = "no predictions, no decisions, and the timelines do not show who left the group"
        missing.append(f"{SCHEDULE_FOLDER}/: no schedules, so {lacks}")
    return schedules


def _stories(
    folder: Path,
    steps: Sequence[int],
    num_ranks: int,
    schedules: Mapping[int, StepSchedule],
    missing: list[str],
) -> dict[int, StepStory]:
    stories = {}
    for step in steps:
        schedule = schedules.get(step)
        ranks = schedule.num_ranks if schedule else num_ranks
        try:
            story = read_story(folder, step, num_ranks=ranks, schedule=schedule)
        except LedgerError as error:
            missing.append(f"{LEDGER_FOLDER}/: step {step} cannot be read ({error})")
            continue
        if story.attempts:
            stories[step] = story
    return stories


def _config(folder: Path, missing: list[str]) -> dict[str, str]:
    path = folder / CONFIG_FILE
    if not path.exists():
        missing.append(f"{CONFIG_FILE}: not there, so the runs' settings cannot be compared")
        return {}
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        missing.append(f"{CONFIG_FILE}: cannot be read ({str(error).splitlines()[0]})")
        return {}
    # A configuration that somebody wrote by hand may hold keys; a report is made to be passed on.
    return dict(_flat(masked(loaded))) if isinstance(loaded, dict) else {}


def _flat(node: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            rows += _flat(value, f"{name}.")
        else:
            rows.append((name, value if isinstance(value, str) else json.dumps(value)))
    return rows


def _metrics(folder: Path, missing: list[str]) -> list[dict[str, Any]]:
    path = folder / METRICS_FILE
    if not path.exists():
        missing.append(f"{METRICS_FILE}: not there, so no figures and no curves")
        return []
    try:
        records = read_metrics(folder)
    except ValueError as error:
        raise RunDirectoryError(f"{path}: a record before the last line is damaged ({error})") from error
    if not records:
        missing.append(f"{METRICS_FILE}: no step has finished yet")
    return records


def _step_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
