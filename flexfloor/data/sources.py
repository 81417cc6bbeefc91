"""Where prompts come from: files of records, reasoning-gym tasks, or the quickstart's arithmetic.

Rule 1: loading is deterministic; the same arguments give the same prompts in the same order on every machine.
Rule 2: every refusal is a DataError that names the file and the record, the key and the fix.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from flexfloor.data import reasoning_gym_tasks
from flexfloor.data.arithmetic import MAX_DIVIDEND, arithmetic_prompts
from flexfloor.data.records import DistinctPrompts, FieldNames, Record, prompt_from_record
from flexfloor.errors import DataError
from flexfloor.types import Prompt

logger = logging.getLogger(__name__)

_Placed = Iterator[tuple[str, Prompt]]
"""Prompts, each with the place that an error would name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """Arguments of one load; which of them count depends on the source."""

    source: str
    path: Path | None = None
    fields: FieldNames = field(default_factory=FieldNames)
    task: str | None = None
    task_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    num_prompts: int | None = None


def load_prompts(
    source: str,
    *,
    path: str | Path | None = None,
    fields: FieldNames | None = None,
    task: str | None = None,
    task_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    num_prompts: int | None = None,
    instruction: str = "",
    as_chat: bool = False,
) -> list[Prompt]:
    """Load the prompts of one source, each once.

    Files (`jsonl`, `parquet`, `hf_disk`): at most the first `num_prompts` in file order. Identical
    records are kept once, and how many were left out is logged. Generated sources (`reasoning_gym`,
    `arithmetic`): `num_prompts` is the size to generate, from `seed`; a reasoning-gym task that repeats
    itself gives fewer. `instruction` goes behind the text of every prompt, and `as_chat` makes a text one
    user message; neither changes the prompt's id. Raises DataError.
    """
    request = _request(source, path, fields, task, task_options, seed, num_prompts)
    distinct = DistinctPrompts()
    prompts = list(islice(distinct.filter(_SOURCES[source](request)), num_prompts))
    if not prompts:
        raise _empty(request)
    if distinct.num_duplicates:
        logger.warning("source=%s path=%s duplicates=%d kept once", source, path, distinct.num_duplicates)
    return [_presented(prompt, instruction, as_chat) for prompt in prompts]


def check_source(
    source: str,
    *,
    path: str | Path | None = None,
    fields: FieldNames | None = None,
    task: str | None = None,
    task_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    num_prompts: int | None = None,
) -> None:
    """Refuse cheaply, before the run starts, what `load_prompts` would; of a file it reads one record."""
    request = _request(source, path, fields, task, task_options, seed, num_prompts)
    if source == "reasoning_gym":
        reasoning_gym_tasks.check_task(_task_set(request))
    elif next(_SOURCES[source](request), None) is None:
        raise _empty(request)


def _empty(request: _Request) -> DataError:
    where = request.path or request.source
    return DataError(f"{where}: no records in it. Fix: set `path` to a dataset that has some")


def _request(
    source: str,
    path: str | Path | None,
    fields: FieldNames | None,
    task: str | None,
    task_options: Mapping[str, Any] | None,
    seed: int,
    num_prompts: int | None,
) -> _Request:
    if source not in _SOURCES:
        raise DataError(f"source={source!r}: unknown. Fix: use one of {', '.join(_SOURCES)}")
    if num_prompts is not None and num_prompts < 1:
        raise DataError(f"num_prompts={num_prompts}: not positive. Fix: set it above 0, or to null for all")
    if source in _GENERATED and num_prompts is None:
        raise DataError(f"source={source}: num_prompts is not set. Fix: say how many prompts to generate")
    if source not in _GENERATED and path is None:
        raise DataError(f"source={source}: path is not set. Fix: set it to the dataset's file or folder")
    return _Request(
        source=source,
        path=None if path is None else Path(path),
        fields=fields or FieldNames(),
        task=task,
        task_options=task_options or {},
        seed=seed,
        num_prompts=num_prompts,
    )


def _presented(prompt: Prompt, instruction: str, as_chat: bool) -> Prompt:
    if prompt.text is None:
        return prompt
    text = f"{prompt.text}\n\n{instruction}" if instruction else prompt.text
    if as_chat:
        return replace(prompt, text=None, messages=({"role": "user", "content": text},))
    return replace(prompt, text=text)


def _jsonl(request: _Request) -> _Placed:
    path = _existing(request)
    if path.is_dir():
        raise DataError(f"{path}: is a folder. Fix: point `path` at one .jsonl file")
    # utf-8-sig: some editors put a byte-order mark in front, which is no part of the first record.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                record = _jsonl_record(f"{path}, line {number}", line)
                yield record.where, prompt_from_record(record, request.fields, request.source)


def _jsonl_record(where: str, line: bytes) -> Record:
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason}). Fix: save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at column {error.colno}"
        raise DataError(f"{where}: not JSON: {problem}. Fix: put one JSON object on each line") from error
    if not isinstance(values, dict):
        raise DataError(f"{where}: a {type(values).__name__}. Fix: put one JSON object on each line")
    return Record(where=where, values=values)


def _parquet(request: _Request) -> _Placed:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = _existing(request)
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: no *.parquet file in this folder. Fix: point `path` at the files")
    for file in files:
        try:
            with pq.ParquetFile(file) as table:
                yield from _rows(request, file, (b.to_pylist() for b in table.iter_batches()))
        except pa.ArrowInvalid as error:
            raise DataError(f"{file}: not a Parquet file ({error}). Fix: correct `path`") from error


def _hf_disk(request: _Request) -> _Placed:
    path = _existing(request)
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"source=hf_disk: {error}. Fix: pip install datasets, or use Parquet") from error
    try:
        table = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        fix = "point `path` at what Dataset.save_to_disk wrote"
        raise DataError(f"{path}: not a saved dataset. Fix: {fix}") from error
    if isinstance(table, datasets.DatasetDict):
        splits = ", ".join(str(path / name) for name in table)
        raise DataError(f"{path}: holds several splits. Fix: point `path` at one of {splits}")
    yield from _rows(request, path, ([row] for row in table))


def _rows(request: _Request, path: Path, batches: Iterator[list[dict[str, Any]]]) -> _Placed:
    number = 0
    for batch in batches:
        for values in batch:
            number += 1
            record = Record(where=f"{path}, row {number}", values=values)
            yield record.where, prompt_from_record(record, request.fields, request.source)


def _existing(request: _Request) -> Path:
    path = request.path
    assert path is not None  # _request has seen to it
    if not path.exists():
        raise DataError(f"{path}: not found (from {Path.cwd()}). Fix: correct `path`")
    return path


def _reasoning_gym(request: _Request) -> _Placed:
    for index, prompt in enumerate(reasoning_gym_tasks.generate_prompts(_task_set(request))):
        yield f"reasoning_gym {request.task}, item {index}", prompt


def _task_set(request: _Request) -> reasoning_gym_tasks.TaskSet:
    if request.task is None:
        raise DataError("source=reasoning_gym: task is not set. Fix: name a task, e.g. task=chain_sum")
    assert request.num_prompts is not None  # _request has seen to it
    return reasoning_gym_tasks.TaskSet(
        task=request.task, options=dict(request.task_options), size=request.num_prompts, seed=request.seed
    )


def _arithmetic(request: _Request) -> _Placed:
    assert request.num_prompts is not None  # _request has seen to it
    unknown = sorted(set(request.task_options) - {"max_dividend"})
    if unknown:
        raise DataError(f"source=arithmetic: unknown task_options {unknown}. Fix: it takes max_dividend only")
    max_dividend = request.task_options.get("max_dividend", MAX_DIVIDEND)
    if type(max_dividend) is not int:
        raise DataError(f"source=arithmetic: max_dividend={max_dividend!r}. Fix: write it as an integer")
    prompts = arithmetic_prompts(request.num_prompts, seed=request.seed, max_dividend=max_dividend)
    for index, prompt in enumerate(prompts):
        yield f"arithmetic, item {index}", prompt


_SOURCES: dict[str, Callable[[_Request], _Placed]] = {
    "jsonl": _jsonl,
    "parquet": _parquet,
    "hf_disk": _hf_disk,
    "reasoning_gym": _reasoning_gym,
    "arithmetic": _arithmetic,
}
_GENERATED = ("reasoning_gym", "arithmetic")
