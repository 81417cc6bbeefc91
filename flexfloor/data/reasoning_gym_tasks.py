"""reasoning-gym tasks: prompts for the driver; in a reward worker the item again, with the task's own scorer.

An item is not shipped: it is rebuilt from (task, options, size, seed, index), which the prompt's metadata
holds, since most items do not survive JSON. Some tasks walk over sets, so an item depends on the
interpreter's hash seed too: items are made only in processes with `child_environment()`, and a rebuilt
item is compared with the prompt.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from flexfloor.data.child_process import child_command, child_environment
from flexfloor.data.records import content_id
from flexfloor.errors import DataError
from flexfloor.types import Prompt

# Searching for a solvable item takes some tasks a second each.
GENERATE_TIMEOUT_S = 900.0
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """`size` items of one task."""

    task: str
    options: dict[str, Any] = field(default_factory=dict)
    """The task's own configuration, without `size` and `seed`; JSON-able."""
    size: int
    seed: int


def check_task(task_set: TaskSet) -> None:
    """Build the task without any item; DataError for an unknown task or an option that it refuses."""
    _in_child({"check": True, **asdict(task_set)}, task_set)


def generate_prompts(task_set: TaskSet) -> Iterator[Prompt]:
    """The items as prompts, in index order; raises DataError."""
    items = _in_child({"check": False, **asdict(task_set)}, task_set)
    for index, (question, answer) in enumerate(items):
        yield Prompt(
            prompt_id=content_id(question, answer),
            text=question,
            messages=None,
            answer=answer,
            source=task_set.task,
            metadata={**asdict(task_set), "index": index},
        )


def score(prompt: Prompt, response_text: str, *, pattern: str | None = None) -> float:
    """The task's own score in [0, 1].

    The answer is group 1 of the last match of `pattern` (nothing matched: scored as no answer). Without a
    pattern it is what the last <answer> tag holds, else the whole response.
    """
    dataset, entry = _item(json.dumps(prompt.metadata, sort_keys=True))
    if content_id(entry["question"], entry["answer"] or "") != prompt.prompt_id:
        raise ValueError(f"task {prompt.source!r} did not rebuild this item: its seed does not reproduce it")
    return float(dataset.score_answer(extracted_answer(response_text, pattern), entry))


def extracted_answer(response_text: str, pattern: str | None) -> str | None:
    """The part of a response that is scored, stripped; None where `pattern` does not match."""
    if pattern is None:
        tagged = _TAG.findall(response_text)
        return (tagged[-1] if tagged else response_text).strip()
    matches = list(re.finditer(pattern, response_text, re.DOTALL))
    return (matches[-1].group(1) or "").strip() if matches else None


# A prompt group is scored item by item, and making an item can be slow.
@lru_cache(maxsize=64)
def _item(metadata: str) -> tuple[Any, dict[str, Any]]:
    place = json.loads(metadata)
    missing = sorted({"task", "options", "size", "seed", "index"} - set(place))
    if missing:
        raise ValueError(f"metadata lacks {missing}: the prompt does not come from source=reasoning_gym")
    dataset = _dataset(_dataset_key(place))
    return dataset, dataset[place["index"]]


def _dataset_key(place: dict[str, Any]) -> str:
    return json.dumps([place[key] for key in ("task", "options", "size", "seed")], sort_keys=True)


@lru_cache(maxsize=8)
def _dataset(key: str) -> Any:
    import reasoning_gym

    task, options, size, seed = json.loads(key)
    return reasoning_gym.create_dataset(task, **options, size=size, seed=seed)


def _in_child(order: dict[str, Any], task_set: TaskSet) -> list[tuple[str, str]]:
    where = f"reasoning_gym task={task_set.task!r} task_options={task_set.options}"
    try:
        child = subprocess.run(
            child_command("flexfloor.data.reasoning_gym_tasks"),
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=GENERATE_TIMEOUT_S,
            env=child_environment(),
        )
    except subprocess.TimeoutExpired as error:
        problem = f"{task_set.size} items took more than {GENERATE_TIMEOUT_S:.0f} s"
        raise DataError(f"{where}: {problem}. Fix: lower num_prompts or make the task easier") from error
    if child.returncode:
        raise DataError(f"{where}: its process ended with {child.returncode} and {child.stderr[-2000:]}")
    reply = json.loads(child.stdout)
    if reply["error"]:
        raise DataError(f"{where}: {reply['error']}")
    return [(question, answer) for question, answer in reply["items"]]


def _reply(order: dict[str, Any]) -> dict[str, Any]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        return {"error": f"{error}. Fix: pip install reasoning-gym"}
    if order["task"] not in DATASETS:
        return {"error": f"no such task. Fix: use one of {', '.join(sorted(DATASETS))}"}
    try:
        dataset = _dataset(_dataset_key(order))
        entries = [] if order["check"] else [dataset[index] for index in range(order["size"])]
    # The libraries' checks are assertions and constructor errors of many kinds; the text goes to the driver.
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}. Fix: correct task_options or num_prompts"}
    # Tasks with many right answers name none.
    return {"error": "", "items": [(entry["question"], entry["answer"] or "") for entry in entries]}


def _main() -> None:
    # Tasks may print; what they print must not get between the lines of the reply.
    reply_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    json.dump({"items": [], **_reply(json.load(sys.stdin))}, reply_to)
    reply_to.close()


if __name__ == "__main__":
    _main()
