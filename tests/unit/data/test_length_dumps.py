"""Readers of rollout dumps: files written as verl and slime write them, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flexfloor.data.length_dumps import DumpedResponse, DumpOptions, read_dump, user_text
from flexfloor.data.records import content_id
from flexfloor.errors import DataError

QWEN = "system\nYou are a helpful assistant.\nuser\nWhat is 3 + 4?\nassistant\n"


def words(text: str) -> int:
    return len(text.split())


def write_lines(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(format_name: str, *paths: Path, **options: Any) -> list[DumpedResponse]:
    return list(read_dump(format_name, paths, DumpOptions(**options)))


@pytest.mark.parametrize(
    "rendered",
    [
        QWEN,
        "user\nWhat is 3 + 4?\nassistant\n<think>\n\n</think>\n\n",
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n",
        "system\n\nCutting Knowledge Date: December 2023\n\nuser\n\nWhat is 3 + 4?assistant\n\n",
        "<bos><start_of_turn>user\nWhat is 3 + 4?<end_of_turn>\n<start_of_turn>model\n",
        "What is 3 + 4?",
    ],
    ids=["qwen", "qwen thinking", "qwen with special tokens", "llama", "gemma", "no template"],
)
def test_the_question_is_found_in_a_rendered_prompt(rendered: str) -> None:
    assert user_text(rendered) == "What is 3 + 4?"


def test_a_question_that_speaks_of_users_stays_whole() -> None:
    question = "The superuser\nlogs in. Who is the assistant of a user\nor model?"
    assert user_text(question) == question


def verl_record(step: int, output: str, **more: object) -> dict[str, object]:
    return {"input": QWEN, "output": output, "gts": "7", "score": 1.0, "step": step, **more}


def test_a_verl_dump(tmp_path: Path) -> None:
    """File 10 comes after file 9; the end token that verl drops is counted; a full response is truncated."""
    write_lines(tmp_path / "10.jsonl", verl_record(10, "it is 7"), verl_record(10, "so " * 8))
    write_lines(tmp_path / "9.jsonl", verl_record(9, "7"))
    first, second, full = read("verl", tmp_path, cap_tokens=9, count_tokens=words)
    assert [one.rollout_step for one in (first, second, full)] == [9, 10, 10]
    assert (first.num_tokens, second.num_tokens, full.num_tokens) == (2, 4, 9)
    assert [one.is_truncated for one in (first, second, full)] == [False, False, True]
    assert first.prompt_tokens == words(QWEN)
    assert first.cap_tokens == 9
    assert first.prompt_id == content_id("What is 3 + 4?", "7")


def test_prompt_ids_come_from_a_field_or_a_dataset_if_there_is_one(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "1.jsonl", verl_record(1, "7", index=17))
    options = {"cap_tokens": 9, "count_tokens": words}
    (by_field,) = read("verl", path, id_field="index", **options)
    (by_dataset,) = read("verl", path, prompt_ids={"What is 3 + 4?": "sum-1"}, **options)
    assert (by_field.prompt_id, by_dataset.prompt_id) == ("17", "sum-1")


def slime_sample(**changes: object) -> dict[str, object]:
    sample: dict[str, object] = {
        "group_index": 0,
        "index": 0,
        "prompt": "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n",
        "tokens": list(range(30)),
        "response": "7",
        "response_length": 18,
        "label": "7",
        "reward": 1.0,
        "status": "completed",
        "metadata": {"uid": "sum-1"},
        "rollout_log_probs": [-0.5] * 18,
    }
    return sample | changes


def save(path: Path, *samples: object, rollout_id: int = 0) -> Path:
    torch.save({"rollout_id": rollout_id, "samples": list(samples)}, path)
    return path


def test_a_slime_dump(tmp_path: Path) -> None:
    """Responses without an end, and dumps of evaluations, are left out."""
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    save(tmp_path / "rollout_10.pt", slime_sample(prompt=messages), rollout_id=10)
    save(tmp_path / "rollout_eval_4.pt", slime_sample())
    save(
        tmp_path / "rollout_2.pt",
        slime_sample(status="truncated"),
        slime_sample(status="aborted"),
        slime_sample(status="failed"),
        slime_sample(rollout_routed_experts=np.ones((3, 2), dtype=np.int32)),
        rollout_id=2,
    )
    truncated, finished, later = read("slime", tmp_path, cap_tokens=40)
    assert [one.rollout_step for one in (truncated, finished, later)] == [2, 2, 10]
    assert {one.prompt_id for one in (truncated, finished, later)} == {content_id("What is 3 + 4?", "7")}
    assert (finished.num_tokens, finished.prompt_tokens) == (18, 12)
    assert (truncated.is_truncated, truncated.cap_tokens) == (True, 18)
    assert (finished.is_truncated, finished.cap_tokens) == (False, 40)
    (named,) = read("slime", tmp_path / "rollout_10.pt", id_field="uid")
    assert (named.prompt_id, named.cap_tokens) == ("sum-1", None)


class Evil:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return Path.touch, (Path("ran"),)  # type: ignore[return-value]


def test_a_slime_dump_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "0.pt", slime_sample(metadata={"x": Evil()}))
    with pytest.raises(DataError, match=r"0\.pt: holds more than plain data"):
        read("slime", path)
    assert not Path("ran").exists()


def test_jsonl_of_lengths(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "lengths.jsonl",
        {"prompt_id": "a", "lengths": [5, 8], "prompt_tokens": 3},
        {"prompt_id": 7, "num_tokens": 6, "rollout_step": 4},
        {"prompt_id": "a", "lengths": [8, 2], "is_truncated": [True, False], "cap_tokens": 20},
    )
    responses = read("jsonl", path, cap_tokens=8)
    assert [(one.prompt_id, one.rollout_step, one.num_tokens) for one in responses] == [
        ("a", 0, 5),
        ("a", 0, 8),
        ("7", 4, 6),
        ("a", 1, 8),
        ("a", 1, 2),
    ]
    assert [one.is_truncated for one in responses] == [False, True, False, True, False]
    assert [one.cap_tokens for one in responses] == [8, 8, 8, 8, 20]
    assert [one.prompt_tokens for one in responses] == [3, 3, 0, 0, 0]


BAD_LINES = {
    "half a line": ('{"prompt_id": "a", "leng', "line 2: not JSON"),
    "a list": ("[1]", "line 2: not a JSON object"),
    "no id": ('{"lengths": [1]}', "line 2: no prompt_id"),
    "no lengths": ('{"prompt_id": "a"}', "line 2: neither `lengths` nor `num_tokens`"),
    "a negative length": ('{"prompt_id": "a", "lengths": [4, -1]}', "line 2: neither"),
    "a fraction": ('{"prompt_id": "a", "num_tokens": 4.5}', "line 2: neither"),
    "above the cap": (
        '{"prompt_id": "a", "num_tokens": 9, "cap_tokens": 8}',
        "line 2: 9 tokens above the cap",
    ),
    "too few flags": ('{"prompt_id": "a", "lengths": [4, 1], "is_truncated": [true]}', "does not fit 2"),
    "a step in words": ('{"prompt_id": "a", "num_tokens": 1, "rollout_step": "x"}', "`rollout_step` is 'x'"),
}


@pytest.mark.parametrize(("line", "text"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_named_with_its_fix(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"prompt_id": "a", "num_tokens": 1}\n' + line + "\n")
    with pytest.raises(DataError) as refused:
        read("jsonl", path)
    assert str(refused.value).startswith(f"{path}, line 2: ")
    assert text in str(refused.value)
    assert "Fix: " in str(refused.value)


def test_what_a_dump_lacks_must_be_given(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "1.jsonl", verl_record(1, "7"))
    with pytest.raises(DataError, match="give --cap-tokens"):
        read("verl", path, count_tokens=words)
    with pytest.raises(DataError, match="give --tokenizer or --chars-per-token"):
        read("verl", path, cap_tokens=9)
    with pytest.raises(DataError, match="line 1: has no uid"):
        read("verl", path, cap_tokens=9, count_tokens=words, id_field="uid")
    with pytest.raises(DataError, match="`input` is not a text"):
        read("verl", write_lines(path, {"prompt_id": "a"}), cap_tokens=9, count_tokens=words)


def test_paths_without_a_dump_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file or folder"):
        read("jsonl", tmp_path / "missing")
    with pytest.raises(DataError, match=r"no \*\.pt in it"):
        read("slime", tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a file of torch", b"PK\x03\x04 cut off"])
def test_a_broken_slime_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "0.pt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"0\.pt: .*Fix: "):
        read("slime", path)


@pytest.mark.parametrize(
    ("dump", "text"),
    [
        ({"rollout_id": 1}, "has no samples"),
        ({"rollout_id": 1, "samples": [3]}, "sample 0: not a dict"),
        ({"samples": [slime_sample()]}, "`rollout_id` is None"),
        ({"rollout_id": 1, "samples": [slime_sample(response_length=None)]}, "sample 0: `response_length`"),
        ({"rollout_id": 1, "samples": [slime_sample(prompt=[])]}, "sample 0: no text of a user"),
    ],
)
def test_a_slime_file_of_another_shape_is_refused(tmp_path: Path, dump: object, text: str) -> None:
    torch.save(dump, tmp_path / "0.pt")
    with pytest.raises(DataError) as refused:
        read("slime", tmp_path / "0.pt")
    assert text in str(refused.value)
