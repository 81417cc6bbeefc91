"""What was planned, decided and seen in one rollout step: the driver writes it, reports read it. PURE.

One JSON file a step, `RUN/schedule/step-000123.json`. Times are seconds since the step began. New fields go
to the end, with a default.
"""

from pathlib import Path

import msgspec
from msgspec import Struct


class PlannedPrompt(Struct, frozen=True, kw_only=True):
    """What was expected of a prompt's responses before the step."""

    prompt_id: str
    expected_tokens: float
    median_tokens: float
    p90_tokens: float
    cap_share: float
    num_seen: float
    """Weight of its history: 0 for a prompt that was never seen."""


class MoveRecord(Struct, frozen=True, kw_only=True):
    response_id: str
    source: int
    target: int
    generated_tokens: int


class DecisionRecord(Struct, frozen=True, kw_only=True):
    """One decision of the release policy that ordered something, with what became of it."""

    at_s: float
    leavers: tuple[int, ...]
    moves: tuple[MoveRecord, ...]
    reason: str
    predicted_gain_s: float
    predicted_remaining_s: float
    outcome: str
    """`done`, or the membership manager's reason for refusing."""
    realised_remaining_s: float
    """From here to the end of the step."""
    took_s: float | None = None
    """From the order to the leavers being out."""


class Absence(Struct, frozen=True, kw_only=True):
    """A rank outside the group; it counts as occupied before and after."""

    dp_rank: int
    from_s: float
    to_s: float | None
    """None: to the end of the step."""


class StepSchedule(Struct, frozen=True, kw_only=True):
    rollout_step: int
    num_ranks: int
    wall_s: float
    batching: str
    batching_reason: str
    """Why the prompts of this step are together, e.g. `bucket 2 of 4`, or why bucketing is off."""
    placement: str
    placement_reason: str
    starting_members: tuple[int, ...]
    predicted_peak_kv_tokens: tuple[int, ...]
    """By dp_rank; empty where nothing was predicted."""
    kv_capacity_tokens: int | None
    num_retractions: int
    decisions: tuple[DecisionRecord, ...] = ()
    absences: tuple[Absence, ...] = ()
    prompts: tuple[PlannedPrompt, ...] = ()
    calibration: dict[str, float] = {}
    """The predictor's error in this step by name, e.g. `rank_correlation`."""


def schedule_path(run_dir: Path, rollout_step: int) -> Path:
    return run_dir / "schedule" / f"step-{rollout_step:06d}.json"


def write_schedule(run_dir: Path, schedule: StepSchedule) -> None:
    path = schedule_path(run_dir, schedule.rollout_step)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(schedule))
    part.replace(path)


def read_schedule(path: Path) -> StepSchedule:
    """Raises FileNotFoundError, or ValueError that names a file that cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StepSchedule)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def read_schedules(run_dir: Path) -> list[StepSchedule]:
    """Those that the run has written so far, by step; ValueError names a file that cannot be read."""
    return [read_schedule(path) for path in sorted((run_dir / "schedule").glob("step-*.json"))]
