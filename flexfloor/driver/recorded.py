"""What a run that is gone on with finds on record: its steps' ledgers, its figures.

A recorded response is used only where the weights are, bit for bit, those that drew it: their checksum
stands in the ledger. Otherwise the whole step is drawn anew, its finished short responses included; keeping
those and drawing the long ones by other weights would favour the short ones.
"""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexfloor.errors import LedgerError, StaleWeightsError
from flexfloor.report.metrics import METRICS_FILE, whole_records
from flexfloor.rollout.ledger import read_ledger, step_path
from flexfloor.rollout.step_state import StepState
from flexfloor.types import Response, ResponseRequest

logger = logging.getLogger(__name__)

CUT_FILE = "metrics_before_resume.jsonl"


def recorded_state(
    folder: Path, *, rollout_step: int, weight_version: int, weight_checksum: str
) -> tuple[StepState | None, str]:
    """What the step's ledger holds, where these very weights drew it, and what became of the step, in words.

    A ledger of other weights, or a damaged one, is set aside under another name; None then, as without any.
    """
    path = step_path(folder, rollout_step)
    if not path.exists():
        return None, ""
    try:
        state = read_ledger(path).state
    except (LedgerError, StaleWeightsError) as error:
        return None, _drawn_anew(path, str(error))
    opened = state.opened
    if opened is None:
        return None, ""
    if (opened.weight_version, opened.weight_checksum) != (weight_version, weight_checksum):
        known = opened.weight_checksum[:12] or "unknown"
        problem = f"weights of checksum {known} drew it, and they could not be rebuilt exactly: now it is "
        return None, _drawn_anew(path, f"{problem}{weight_checksum[:12]}")
    counts = f"{state.num_finished} of {opened.num_responses} responses were finished"
    return state, f"goes on from its record under the same weights: {counts}, {state.num_tokens} tokens there"


def _drawn_anew(path: Path, reason: str) -> str:
    return f"the whole step is drawn anew, and its old record is {set_aside(path).name}: {reason}"


def set_aside(path: Path) -> Path:
    """Rename it, so that nobody takes it for the step's own."""
    number = 1
    while (target := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    path.rename(target)
    return target


def whole_step(state: StepState, requests: Sequence[ResponseRequest]) -> tuple[Response, ...] | None:
    """All responses, in the order of the requests; None while some have not finished."""
    for request in requests:
        known = state.responses.get(request.response_id)
        if known is None or known.finished is None:
            return None
    return tuple(state.response(request.response_id) for request in requests)


def cut_metrics(run_dir: Path, first_step: int) -> dict[int, dict[str, Any]]:
    """Take the figures from `first_step` on, which are about to be made again, out of the run's own.

    They are kept in a file beside it. Returns all that are there, by step; the last one of a step counts.
    """
    path, aside = run_dir / METRICS_FILE, run_dir / CUT_FILE
    records = whole_records(path)
    later = [record for record in records if record["rollout_step"] >= first_step]
    if later:
        before = whole_records(aside)
        _write_whole(aside, [*before, *later])
    _write_whole(path, [record for record in records if record["rollout_step"] < first_step])
    return {record["rollout_step"]: record for record in whole_records(aside)}


def _write_whole(path: Path, records: Sequence[dict[str, Any]]) -> None:
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
