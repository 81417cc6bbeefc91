"""Records -> prompts: identity, duplicates, and what each refusal says."""

from typing import Any

import pytest

from flexfloor.data.records import DistinctPrompts, FieldNames, Record, content_id, prompt_from_record
from flexfloor.errors import DataError
from flexfloor.types import Prompt

FIELDS = FieldNames()


def parsed(**values: Any) -> Prompt:
    return prompt_from_record(Record(where="train.jsonl, line 17", values=values), FIELDS, "jsonl")


def test_content_id_does_not_change_between_releases() -> None:
    # Lengths in the history are kept under these ids: a change here orphans every user's history.
    assert content_id("97%7:", "6") == "287e63c182c6a3f6"
    assert content_id(({"role": "user", "content": "hi"},), "6") == "94681abf35b34caf"


def test_content_id_separates_prompt_and_answer() -> None:
    ids = {content_id("a", "b"), content_id("b", "a"), content_id("ab", ""), content_id("", "ab")}
    assert len(ids) == 4


def test_key_order_of_a_message_does_not_change_the_id() -> None:
    one = parsed(messages=[{"role": "user", "content": "hi"}], answer="6")
    other = parsed(messages=[{"content": "hi", "role": "user"}], answer="6")
    assert one.prompt_id == other.prompt_id


def test_own_id_metadata_and_messages_are_carried_over() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": None}]
    prompt = parsed(messages=messages, answer="", id=7, metadata={"level": 3})
    assert prompt == Prompt(
        prompt_id="7",
        text=None,
        messages=({"role": "system", "content": "s"}, {"role": "user", "content": "u"}),
        answer="",
        source="jsonl",
        metadata={"level": 3},
    )


def test_field_names_are_configurable() -> None:
    fields = FieldNames(prompt="question", answer="solution", id="uid", metadata="extra")
    record = Record(where="x", values={"question": "q", "solution": "s", "uid": "u", "extra": {"k": 1}})
    prompt = prompt_from_record(record, fields, "jsonl")
    assert (prompt.text, prompt.answer, prompt.prompt_id, prompt.metadata) == ("q", "s", "u", {"k": 1})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"answer": "a"}, "neither of 'prompt' and 'messages' found (keys here: answer)"),
        ({"prompt": "p", "messages": [{}], "answer": "a"}, "both of 'prompt' and 'messages' found"),
        ({"prompt": 3, "answer": "a"}, "key 'prompt' is int 3, expected a string"),
        ({"prompt": "", "answer": "a"}, "key 'prompt' is an empty string"),
        ({"prompt": "p"}, "key 'answer' is missing (keys here: prompt)"),
        ({"prompt": "p", "answer": 6}, "key 'answer' is int 6, expected a string. Fix: quote the value"),
        ({"prompt": "p", "answer": None}, "key 'answer' is NoneType None, expected a string"),
        ({"messages": [], "answer": "a"}, "key 'messages' is list []"),
        ({"messages": "hi", "answer": "a"}, "key 'messages' is str 'hi'"),
        ({"messages": ["hi"], "answer": "a"}, "messages[0] is str 'hi'"),
        ({"messages": [{"role": "user"}], "answer": "a"}, "messages[0] has no key 'content'"),
        ({"messages": [{"role": "user", "content": 1}], "answer": "a"}, "messages[0].content is int 1"),
        ({"prompt": "p", "answer": "a", "id": True}, "key 'id' is bool True"),
        ({"prompt": "p", "answer": "a", "id": ""}, "key 'id' is str ''"),
        ({"prompt": "p", "answer": "a", "metadata": [1]}, "key 'metadata' is list [1], expected an object"),
        ({"prompt": "p", "answer": "a", "metadata": {"s": {1}}}, "key 'metadata' does not fit in JSON"),
    ],
)
def test_a_bad_record_is_refused_with_place_key_and_fix(values: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        parsed(**values)
    text = str(caught.value)
    assert text.startswith("train.jsonl, line 17: ")
    assert said in text
    assert ". Fix: " in text


def test_a_long_value_is_cut_in_the_error() -> None:
    with pytest.raises(DataError) as caught:
        parsed(prompt="p", answer=["x" * 10_000])
    assert len(str(caught.value)) < 300


def test_identical_records_are_kept_once_and_counted() -> None:
    distinct = DistinctPrompts()
    same, other = parsed(prompt="p", answer="a"), parsed(prompt="q", answer="a")
    again = parsed(prompt="p", answer="a")
    kept = list(distinct.filter([("1", same), ("2", other), ("3", again), ("4", again)]))
    assert kept == [same, other]
    assert distinct.num_duplicates == 2


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": "q", "answer": "a", "id": "x"},
        {"prompt": "p", "answer": "b", "id": "x"},
        {"prompt": "p", "answer": "a", "id": "x", "metadata": {"k": 1}},
    ],
)
def test_one_id_with_two_contents_is_refused_with_both_places(other: dict[str, Any]) -> None:
    pairs = [("f, line 1", parsed(prompt="p", answer="a", id="x")), ("f, line 9", parsed(**other))]
    with pytest.raises(DataError, match=r"f, line 9: id 'x' already stands at f, line 1 .* Fix: give each"):
        list(DistinctPrompts().filter(pairs))
