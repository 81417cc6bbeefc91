"""Loading from files and from the arithmetic generator."""

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexfloor.data.records import FieldNames
from flexfloor.data.sources import check_source, load_prompts
from flexfloor.errors import DataError

ROWS = [{"prompt": f"q{index}", "answer": str(index), "metadata": {"level": index}} for index in range(4)]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_hf(path: Path, rows: list[dict[str, Any]]) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


@pytest.mark.parametrize(
    ("source", "write"), [("jsonl", write_jsonl), ("parquet", write_parquet), ("hf_disk", write_hf)]
)
def test_every_file_source_gives_the_same_prompts(source: str, write: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "data", ROWS)
    check_source(source, path=path)
    prompts = load_prompts(source, path=str(path))
    assert [(p.text, p.answer, p.metadata, p.source) for p in prompts] == [
        (f"q{index}", str(index), {"level": index}, source) for index in range(4)
    ]
    reference = load_prompts("jsonl", path=write_jsonl(tmp_path / "reference", ROWS))
    assert [p.prompt_id for p in prompts] == [p.prompt_id for p in reference]


def test_a_folder_of_parquet_files_is_read_in_name_order(tmp_path: Path) -> None:
    write_parquet(tmp_path / "b.parquet", ROWS[2:])
    write_parquet(tmp_path / "a.parquet", ROWS[:2])
    assert [p.text for p in load_prompts("parquet", path=tmp_path)] == ["q0", "q1", "q2", "q3"]


def test_messages_come_through_parquet(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "hi", "name": None},
        {"role": "user", "content": "b", "name": "n"},
    ]
    path = write_parquet(tmp_path / "m.parquet", [{"messages": messages, "answer": "a"}])
    (prompt,) = load_prompts("parquet", path=path)
    assert prompt.messages == (
        {"role": "user", "content": "hi"},
        {"role": "user", "content": "b", "name": "n"},
    )


def test_num_prompts_caps_a_file_at_its_first_distinct_records(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [ROWS[0], ROWS[0], ROWS[1], ROWS[2]])
    assert [p.text for p in load_prompts("jsonl", path=path, num_prompts=2)] == ["q0", "q1"]
    assert len(load_prompts("jsonl", path=path, num_prompts=99)) == 3


def test_duplicates_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [ROWS[0], ROWS[1], ROWS[0], ROWS[0]])
    with caplog.at_level(logging.WARNING, logger="flexfloor.data.sources"):
        assert len(load_prompts("jsonl", path=path)) == 2
    assert f"path={path} duplicates=2 kept once" in caplog.text


def test_blank_lines_and_a_byte_order_mark_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "q", "answer": "\xc3\xa9"}\n\n  \n{"prompt": "r", "answer": "b"}'
    )
    assert [(p.text, p.answer) for p in load_prompts("jsonl", path=path)] == [("q", "\u00e9"), ("r", "b")]


def test_instruction_and_chat_do_not_change_the_id(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ROWS[:1])
    (plain,) = load_prompts("jsonl", path=path)
    (chat,) = load_prompts("jsonl", path=path, instruction="Answer briefly.", as_chat=True)
    assert chat.text is None
    assert chat.messages == ({"role": "user", "content": "q0\n\nAnswer briefly."},)
    assert chat.prompt_id == plain.prompt_id


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "q", "answer": "a"}\n{"prompt": \n', "line 2: not JSON: Expecting value at column"),
        (b'{"prompt": "q", "answer": "a"}\n["q"]\n', "line 2: a list. Fix: put one JSON object on each line"),
        (b'{"prompt": "q", "answer": "a"}\n{"prompt": "\xff"}\n', "line 2: not UTF-8"),
        (b'{"prompt": "q", "answer": "a"}\n\n{"prompt": "q"}\n', "line 3: key 'answer' is missing"),
        (b"\n \n", "no records in it. Fix: set `path`"),
        (b"", "no records in it. Fix: set `path`"),
    ],
)
def test_bad_jsonl_is_refused_with_file_line_and_fix(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_prompts("jsonl", path=path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_bad_rows_of_columnar_files_are_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "d.parquet", [ROWS[0], {**ROWS[1], "answer": None}])
    with pytest.raises(DataError, match=r"d\.parquet, row 2: key 'answer' is NoneType"):
        load_prompts("parquet", path=path)


def test_what_is_not_the_right_kind_of_file_is_refused(tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "d.jsonl", ROWS)
    with pytest.raises(DataError, match=r"d\.jsonl: not a Parquet file .* Fix: "):
        load_prompts("parquet", path=text)
    with pytest.raises(DataError, match=r"is a folder\. Fix: point `path` at one \.jsonl file"):
        load_prompts("jsonl", path=tmp_path)
    with pytest.raises(DataError, match=r"no \*\.parquet file in this folder\. Fix: "):
        load_prompts("parquet", path=tmp_path)


def test_hf_disk_wants_one_saved_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(DataError, match=rf"several splits\. Fix: point `path` at one of {tmp_path}/d/train"):
        load_prompts("hf_disk", path=tmp_path / "d")
    assert len(load_prompts("hf_disk", path=tmp_path / "d" / "train")) == 4
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: not a saved dataset\. Fix: "):
        load_prompts("hf_disk", path=tmp_path / "empty")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"source": "csv"}, "source='csv': unknown. Fix: use one of jsonl, parquet, hf_disk, reasoning_gym"),
        ({"source": "jsonl"}, "source=jsonl: path is not set. Fix: set it"),
        ({"source": "jsonl", "path": "nowhere.jsonl"}, "nowhere.jsonl: not found (from "),
        ({"source": "jsonl", "path": "x", "num_prompts": 0}, "num_prompts=0: not positive. Fix: "),
        ({"source": "arithmetic"}, "source=arithmetic: num_prompts is not set. Fix: "),
        ({"source": "arithmetic", "num_prompts": 761}, "num_prompts=761 of the 760 prompts"),
        ({"source": "arithmetic", "num_prompts": 1, "task_options": {"x": 1}}, "unknown task_options ['x']"),
        (
            {"source": "arithmetic", "num_prompts": 1, "task_options": {"max_dividend": "9"}},
            "max_dividend='9'",
        ),
        ({"source": "reasoning_gym", "num_prompts": 1}, "task is not set. Fix: name a task"),
    ],
)
def test_both_load_and_check_refuse_bad_arguments(arguments: dict[str, Any], said: str) -> None:
    for function in (load_prompts, check_source):
        with pytest.raises(DataError) as caught:
            function(**arguments)
        assert said in str(caught.value)


def test_check_source_reads_the_first_record_only(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [ROWS[0], {"prompt": "no answer"}])
    check_source("jsonl", path=path)
    with pytest.raises(DataError, match="neither of 'question' and 'chat'"):
        check_source("jsonl", path=path, fields=FieldNames(prompt="question", messages="chat"))
    with pytest.raises(DataError, match="line 2"):
        load_prompts("jsonl", path=path)


def test_arithmetic_is_loaded_from_its_seed() -> None:
    prompts = load_prompts("arithmetic", seed=3, num_prompts=5, task_options={"max_dividend": 199})
    assert prompts == load_prompts("arithmetic", seed=3, num_prompts=5, task_options={"max_dividend": 199})
    assert prompts != load_prompts("arithmetic", seed=4, num_prompts=5, task_options={"max_dividend": 199})
