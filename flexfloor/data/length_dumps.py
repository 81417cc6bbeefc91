"""Lengths of responses from what other frameworks wrote: verl's and slime's rollout dumps, and plain JSONL.

Rule 1: only numbers are kept; a dump of many gigabytes of text is read line by line.
Rule 2: every refusal is a DataError that names the file, the place in it and the fix.

verl (`trainer.rollout_data_dir`): one `STEP.jsonl` a step, a record a response with `input`, `output` (texts
without special tokens), `gts`, `score`, `step`. Neither token counts nor the reason of the end are in it.
slime (`--save-debug-rollout-data`): `torch.save` of `rollout_id` and `samples`, each sample a dict with
`prompt`, `label`, `tokens`, `response_length`, `status`.
JSONL: one object a prompt (`lengths`) or a response (`num_tokens`) with `prompt_id` and, if known,
`prompt_tokens`, `is_truncated` (one or as many as lengths), `cap_tokens`, `rollout_step`.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexfloor.data.records import content_id
from flexfloor.errors import DataError

VERL_FULL_SHARE = 0.99
"""Of the cap, above which a verl response counts as cut off: text turned into tokens again may give fewer."""

_SPECIAL = re.compile(r"<\|[^|<>]+\|>|<(?:start|end)_of_turn>|<bos>")
_CHAT = re.compile(
    r"(?:\A|.*?(?<!\w))user\n+(?P<question>.*?)\s*(?:assistant|model)\s*(?:<think>\s*)?(?:</think>\s*)?\Z",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedResponse:
    """One response of a dump."""

    prompt_id: str
    rollout_step: int
    num_tokens: int
    prompt_tokens: int
    """0: unknown."""
    is_truncated: bool
    cap_tokens: int | None
    """None: the dump does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpOptions:
    """What a dump does not say by itself."""

    cap_tokens: int | None = None
    """Of a response."""
    count_tokens: Callable[[str], int] | None = None
    """For dumps that hold texts only."""
    id_field: str | None = None
    """Key of a record, or of its metadata, that holds the dataset's own prompt id."""
    prompt_ids: Mapping[str, str] | None = None
    """Prompt id by the question's text, where the dataset is at hand."""


Reader = Callable[[Path, DumpOptions], Iterator[DumpedResponse]]


def read_dump(format_name: str, paths: Sequence[Path], options: DumpOptions) -> Iterator[DumpedResponse]:
    """Responses of these files or folders, files in order of the numbers in their names."""
    read, suffix = READERS[format_name]
    for path in paths:
        for file in _files(path, suffix):
            yield from read(file, options)


def user_text(rendered: str) -> str:
    """The question in a prompt that a chat template rendered, with or without its special tokens."""
    plain = _SPECIAL.sub("", rendered)
    match = _CHAT.match(plain)
    return (match["question"] if match else plain).strip()


def _files(path: Path, suffix: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: there is no such file or folder. Fix: check the path")
    # slime names dumps of evaluations eval_N; their prompts are not trained on.
    files = [file for file in path.glob(f"*{suffix}") if "eval_" not in file.name]
    if not files:
        raise DataError(f"{path}: no *{suffix} in it. Fix: name the folder of the dump")
    return sorted(files, key=lambda file: ([int(n) for n in re.findall(r"\d+", file.stem)], file.name))


def _read_verl(path: Path, options: DumpOptions) -> Iterator[DumpedResponse]:
    cap, count = options.cap_tokens, options.count_tokens
    if cap is None:
        raise DataError(f"{path}: a verl dump does not name the cap. Fix: give --cap-tokens")
    if count is None:
        raise DataError(f"{path}: a verl dump holds texts only. Fix: give --tokenizer or --chars-per-token")
    for where, record in _records(path):
        question, output = _text(record, "input", where), _text(record, "output", where)
        # The end-of-sequence token is among the special tokens that verl leaves out.
        num_tokens = count(output) + 1
        is_truncated = num_tokens >= VERL_FULL_SHARE * cap
        yield DumpedResponse(
            prompt_id=_prompt_id(record, user_text(question), record.get("gts"), options, where),
            rollout_step=_whole(record, "step", where),
            num_tokens=cap if is_truncated else num_tokens,
            prompt_tokens=count(question),
            is_truncated=is_truncated,
            cap_tokens=cap,
        )


def _read_slime(path: Path, options: DumpOptions) -> Iterator[DumpedResponse]:
    dump = _load_tensors(path)
    if not isinstance(dump, dict) or not isinstance(dump.get("samples"), list):
        raise DataError(f"{path}: has no samples. Fix: use a file of --save-debug-rollout-data")
    for number, sample in enumerate(dump["samples"]):
        where = f"{path}, sample {number}"
        if not isinstance(sample, dict):
            raise DataError(f"{where}: not a dict. Fix: use a file of --save-debug-rollout-data")
        # pending, aborted, failed: the response has no end, so its length says little.
        if sample.get("status") in ("completed", "truncated"):
            yield _slime_response(sample, _whole(dump, "rollout_id", str(path)), options, where)


def _slime_response(
    sample: Mapping[str, Any], rollout_step: int, options: DumpOptions, where: str
) -> DumpedResponse:
    prompt = sample.get("prompt")
    question = user_text(prompt) if isinstance(prompt, str) else _last_user_message(prompt, where)
    num_tokens = _whole(sample, "response_length", where)
    is_truncated = sample["status"] == "truncated"
    return DumpedResponse(
        prompt_id=_prompt_id(sample, question, sample.get("label"), options, where),
        rollout_step=rollout_step,
        num_tokens=num_tokens,
        prompt_tokens=max(0, len(sample.get("tokens") or ()) - num_tokens),
        is_truncated=is_truncated,
        cap_tokens=num_tokens if is_truncated else options.cap_tokens,
    )


def _read_jsonl(path: Path, options: DumpOptions) -> Iterator[DumpedResponse]:
    times: Counter[str] = Counter()
    for where, record in _records(path):
        prompt_id = record.get(options.id_field or "prompt_id")
        if not isinstance(prompt_id, str | int) or prompt_id == "":
            raise DataError(f"{where}: no {options.id_field or 'prompt_id'}. Fix: give each line one")
        prompt_id = str(prompt_id)
        # Without steps, a prompt's n-th line is taken for the n-th pass.
        step = _whole(record, "rollout_step", where) if "rollout_step" in record else times[prompt_id]
        times[prompt_id] += 1
        yield from _jsonl_responses(record, prompt_id, step, options, where)


def _jsonl_responses(
    record: Mapping[str, Any], prompt_id: str, rollout_step: int, options: DumpOptions, where: str
) -> Iterator[DumpedResponse]:
    lengths = record["lengths"] if "lengths" in record else [record.get("num_tokens")]
    if not isinstance(lengths, list) or not all(_is_count(length) for length in lengths):
        problem = "neither `lengths` nor `num_tokens` holds token counts"
        raise DataError(f"{where}: {problem}. Fix: write whole numbers, not below 0")
    cap = _whole(record, "cap_tokens", where) if "cap_tokens" in record else options.cap_tokens
    flags = _flags(record, lengths, cap, where)
    prompt_tokens = _whole(record, "prompt_tokens", where) if "prompt_tokens" in record else 0
    for length, is_truncated in zip(lengths, flags, strict=True):
        if cap is not None and length > cap:
            raise DataError(f"{where}: {length} tokens above the cap {cap}. Fix: correct the cap")
        yield DumpedResponse(
            prompt_id=prompt_id,
            rollout_step=rollout_step,
            num_tokens=length,
            prompt_tokens=prompt_tokens,
            is_truncated=is_truncated,
            cap_tokens=length if is_truncated else cap,
        )


def _flags(record: Mapping[str, Any], lengths: Sequence[int], cap: int | None, where: str) -> list[bool]:
    flags = record.get("is_truncated")
    if flags is None:
        return [cap is not None and length >= cap for length in lengths]
    flags = flags if isinstance(flags, list) else [flags] * len(lengths)
    if len(flags) != len(lengths) or not all(isinstance(flag, bool) for flag in flags):
        raise DataError(f"{where}: is_truncated does not fit {len(lengths)} lengths. Fix: one flag a length")
    return flags


READERS: Mapping[str, tuple[Reader, str]] = {
    "verl": (_read_verl, ".jsonl"),
    "slime": (_read_slime, ".pt"),
    "jsonl": (_read_jsonl, ".jsonl"),
}
"""By format: the reader of one file, and how its files end."""


def _prompt_id(
    record: Mapping[str, Any], question: str, answer: object, options: DumpOptions, where: str
) -> str:
    if options.id_field is None:
        known = (options.prompt_ids or {}).get(question)
        return known or content_id(question, answer_text(answer))
    metadata = record.get("metadata")
    value = record.get(options.id_field)
    if value is None and isinstance(metadata, Mapping):
        value = metadata.get(options.id_field)
    if value is None or value == "":
        raise DataError(f"{where}: has no {options.id_field}. Fix: name another --id-field, or none")
    return str(value)


def answer_text(answer: object) -> str:
    """A label as the text that a prompt's id is made of."""
    if answer is None or isinstance(answer, str):
        return answer or ""
    return json.dumps(answer, sort_keys=True, default=str)


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            if line.strip():
                yield where, _object(line, where)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        # A run that still writes, or was killed, leaves half a line at the end.
        raise DataError(f"{where}: not JSON ({error}). Fix: remove or complete the line") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: not a JSON object. Fix: put one object on each line")
    return record


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: `{key}` is not a text. Fix: check --format")
    return value


def _whole(record: Mapping[str, Any], key: str, where: str) -> int:
    value = record.get(key)
    if not _is_count(value):
        raise DataError(f"{where}: `{key}` is {value!r}, not a whole number. Fix: check --format")
    assert isinstance(value, int), "a count is an int"
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _last_user_message(prompt: object, where: str) -> str:
    messages = prompt if isinstance(prompt, list) else []
    texts = [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user"]
    if not texts or not isinstance(texts[-1], str):
        raise DataError(f"{where}: no text of a user in `prompt`. Fix: name the prompt's id by --id-field")
    return texts[-1].strip()


def _load_tensors(path: Path) -> Any:
    """A file of torch.save that holds plain data; nothing in it is ever run."""
    import pickle

    import numpy as np
    import torch

    reconstruct: Any = np.ndarray(0).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"}
    try:
        with torch.serialization.safe_globals([reconstruct, np.ndarray, np.dtype, *dtypes]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        problem = (
            "holds more than plain data, which could run code" if "WeightsUnpickler" in str(error) else ""
        )
        problem = problem or "is not a file of torch.save"
        raise DataError(f"{path}: {problem}. Fix: write its lengths to a jsonl") from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({_first_line(error)}). Fix: copy the file again") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
