"""One record of a dataset -> one `Prompt`; identity and duplicates of prompts.

Rule 1: a prompt's id is the record's own, else a hash of what is asked and answered, so that it is the same
in every pass, run and machine.
Rule 2: an identical record seen again is kept once; one id with two contents is an error.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flexfloor.errors import DataError
from flexfloor.types import Prompt

_ID_HEX_DIGITS = 16
_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """Keys under which a dataset keeps what a prompt needs."""

    prompt: str = "prompt"
    """Plain text. A record has this or `messages`, not both."""
    messages: str = "messages"
    """List of `{"role": ..., "content": ...}`."""
    answer: str = "answer"
    id: str = "id"
    """Optional."""
    metadata: str = "metadata"
    """Optional; a mapping that JSON can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One raw record and where it stands, e.g. `train.jsonl, line 17`."""

    where: str
    values: Mapping[str, Any]


def content_id(question: str | tuple[dict[str, str], ...], answer: str) -> str:
    """First 16 hex digits of the SHA-256 of the question (text or messages) and answer in canonical JSON."""
    body = json.dumps({"answer": answer, "prompt": question}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(body.encode("ascii")).hexdigest()[:_ID_HEX_DIGITS]


def prompt_from_record(record: Record, fields: FieldNames, source: str) -> Prompt:
    """Check one record and carry it over; raises DataError with place, key and fix."""
    text, messages = _question(record, fields)
    answer = _string(record, fields.answer)
    own_id = _own_id(record, fields)
    # Exactly one of the two is set.
    question = text if text is not None else messages or ()
    return Prompt(
        prompt_id=content_id(question, answer) if own_id is None else own_id,
        text=text,
        messages=messages,
        answer=answer,
        source=source,
        metadata=_metadata(record, fields),
    )


class DistinctPrompts:
    """Passes each prompt once; `num_duplicates` counts the identical records that were left out."""

    def __init__(self) -> None:
        self.num_duplicates = 0
        self._seen: dict[str, tuple[str, Prompt]] = {}

    def filter(self, placed: Iterable[tuple[str, Prompt]]) -> Iterator[Prompt]:
        """Take (where, prompt) pairs; raises DataError where one id stands for two different prompts."""
        for where, prompt in placed:
            first_where, first = self._seen.setdefault(prompt.prompt_id, (where, prompt))
            if first is prompt:
                yield prompt
            elif first == prompt:
                self.num_duplicates += 1
            else:
                raise DataError(
                    f"{where}: id {prompt.prompt_id!r} already stands at {first_where} for another prompt, "
                    "answer or metadata. Fix: give each prompt its own id"
                )


def _question(record: Record, fields: FieldNames) -> tuple[str | None, tuple[dict[str, str], ...] | None]:
    has_text = record.values.get(fields.prompt) is not None
    has_messages = record.values.get(fields.messages) is not None
    if has_text == has_messages:
        found = "both" if has_text else "neither"
        problem = f"{found} of {fields.prompt!r} and {fields.messages!r} found (keys here: {_keys(record)})"
        raise _bad(record, problem, "give exactly one, or set the name of the right key in `fields`")
    if has_messages:
        return None, _messages(record, fields.messages)
    text = _string(record, fields.prompt)
    if not text:
        raise _bad(record, f"key {fields.prompt!r} is an empty string", "remove the record")
    return text, None


def _messages(record: Record, key: str) -> tuple[dict[str, str], ...]:
    raw = record.values[key]
    if not isinstance(raw, list | tuple) or not raw:
        raise _bad(record, f"key {key!r} is {_shown(raw)}", "give a non-empty list of messages")
    return tuple(_message(record, f"{key}[{index}]", message) for index, message in enumerate(raw))


def _message(record: Record, key: str, raw: object) -> dict[str, str]:
    fix = 'write {"role": "user", "content": "..."} with string values'
    if not isinstance(raw, Mapping):
        raise _bad(record, f"{key} is {_shown(raw)}", fix)
    # Columnar files fill the keys that a message lacks with null.
    message = {name: value for name, value in raw.items() if value is not None}
    for name in ("role", "content"):
        if name not in message:
            raise _bad(record, f"{key} has no key {name!r}", fix)
    for name, value in message.items():
        if not isinstance(value, str):
            raise _bad(record, f"{key}.{name} is {_shown(value)}", fix)
    return message


def _string(record: Record, key: str) -> str:
    value = record.values.get(key, _MISSING)
    if value is _MISSING:
        fix = "add it, or set its name in `fields`"
        raise _bad(record, f"key {key!r} is missing (keys here: {_keys(record)})", fix)
    if not isinstance(value, str):
        raise _bad(record, f"key {key!r} is {_shown(value)}, expected a string", "quote the value")
    return value


def _own_id(record: Record, fields: FieldNames) -> str | None:
    value = record.values.get(fields.id)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise _bad(record, f"key {fields.id!r} is {_shown(value)}", "use a non-empty string or an integer")
    return str(value)


def _metadata(record: Record, fields: FieldNames) -> dict[str, Any]:
    value = record.values.get(fields.metadata)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        problem = f"key {fields.metadata!r} is {_shown(value)}, expected an object"
        raise _bad(record, problem, "wrap the value in an object")
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        fix = "keep to strings, numbers, lists and objects"
        raise _bad(record, f"key {fields.metadata!r} does not fit in JSON ({error})", fix) from error
    return dict(value)


def _bad(record: Record, problem: str, fix: str) -> DataError:
    return DataError(f"{record.where}: {problem}. Fix: {fix}")


def _keys(record: Record) -> str:
    return ", ".join(sorted(map(str, record.values))) or "none"


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
