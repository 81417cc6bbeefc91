"""The history file: what is kept, in which order, and what kills, damage and company do to it."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length_worlds import observe

from flexfloor.scheduling.history import HistoryError, LengthHistory
from flexfloor.scheduling.observation import LengthObservation
from flexfloor.scheduling.predict import Predictor


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lengths" / "history.sqlite"


def kept(path: Path, dataset: str = "math", **arguments: object) -> list[LengthObservation]:
    with LengthHistory.open(path, must_exist=True) as history:
        return history.read(dataset, **arguments)  # type: ignore[arg-type]


def store(path: Path, *calls: list[LengthObservation]) -> list[int]:
    with LengthHistory.open(path) as history:
        return [history.add(call) for call in calls]


def test_what_was_added_is_read_back_by_a_later_run(path: Path) -> None:
    steps = [observe("a", [5, 9], step=0, prompt_tokens=7), observe("b", [16_384], step=1)]
    assert store(path, *steps) == [2, 1]
    assert kept(path) == steps[0] + steps[1]


def test_adding_again_changes_nothing(path: Path) -> None:
    step = observe("a", [5, 9])
    assert store(path, step, step, []) == [2, 0, 0]
    assert kept(path) == step


def test_a_response_that_is_drawn_again_takes_the_place_of_the_first(path: Path) -> None:
    first, second, again = observe("a", [5], step=0), observe("a", [6], step=1), observe("a", [50], step=0)
    assert store(path, first, second, again) == [1, 1, 0]
    assert [one.num_tokens for one in kept(path)] == [50, 6]


def test_one_prompt_id_in_two_datasets_is_two_prompts(path: Path) -> None:
    math, code = observe("17", [5]), observe("17", [900], dataset="code")
    assert store(path, math, code) == [1, 1]
    assert kept(path) == math
    assert kept(path, "code") == code
    assert kept(path, "unknown") == []


def test_runs_follow_each_other_whatever_order_their_steps_came_in(path: Path) -> None:
    a = [observe("p", [step], step=step, run_id="a") for step in range(3)]
    b = [observe("p", [10 + step], step=step, run_id="b") for step in range(2)]
    store(path, a[1], b[1], a[0], b[0], a[2])
    assert [one.num_tokens for one in kept(path)] == [0, 1, 2, 10, 11]


def test_a_limit_keeps_the_last_passes_of_every_prompt(path: Path) -> None:
    store(
        path,
        observe("old", [1, 2], step=0, pass_index=0),
        observe("new", [3], step=1, pass_index=0),
        observe("new", [4], step=2, pass_index=1),
        observe("new", [5, 6], step=0, pass_index=0, run_id="later"),
    )
    assert [one.num_tokens for one in kept(path, limit_passes=1)] == [1, 2, 5, 6]
    assert [one.num_tokens for one in kept(path, limit_passes=2)] == [1, 2, 4, 5, 6]
    with pytest.raises(ValueError, match="limit_passes=0"):
        kept(path, limit_passes=0)


def test_a_resumed_run_sees_what_it_saw_before(path: Path) -> None:
    """Its own steps from the resumed one on are left out; a run that came in between does not go last."""
    other = [observe(str(p), [40 + p], step=0, run_id="other") for p in range(4)]
    own = [observe(str(p), [10 * p + 10], step=p, run_id="own") for p in range(4)]
    store(path, *own[:2], *other, *own[2:])
    seen = kept(path, resume=("own", 2))
    assert [one.num_tokens for one in seen] == [40, 41, 42, 43, 10, 20]
    again = [observe(str(p), [11 * p + 11], step=p, run_id="own") for p in (2, 3)]
    assert store(path, *again) == [0, 0]
    assert kept(path, resume=("own", 2)) == seen
    assert Predictor.from_history(seen, cap_tokens=100).num_seen("3") == 1


def test_counts_by_dataset(path: Path) -> None:
    store(
        path,
        observe("a", [10, 100], cap=100),
        observe("b", [40], step=1, pass_index=1, cap=100),
        observe("a", [6], run_id="other", dataset="code"),
    )
    with LengthHistory.open(path) as history:
        code, math = history.counts()
    assert (code.dataset, code.num_responses, code.mean_tokens) == ("code", 1, 6)
    assert (math.num_responses, math.num_prompts, math.num_runs, math.num_passes) == (3, 2, 1, 2)
    assert (math.num_truncated, math.mean_tokens, math.longest_tokens) == (1, 50, 100)


def test_a_call_that_fails_leaves_nothing(path: Path) -> None:
    store(path, observe("a", [5]))
    bad = [*observe("b", [1, 2]), replace(observe("c", [3])[0], weight_version=None)]  # type: ignore[arg-type]
    with pytest.raises(sqlite3.IntegrityError), LengthHistory.open(path) as history:
        history.add(bad)
    assert [one.prompt_id for one in kept(path)] == ["a"]


WRITER = """
import sys
sys.path[:0] = {paths!r}
from length_worlds import observe
from flexfloor.scheduling.history import LengthHistory

class StopsBeforeCommit:
    def __init__(self, connection):
        self.connection = connection

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def executemany(self, query, rows):
        self.connection.executemany(query, rows)
        print("in the middle", flush=True)
        sys.stdin.read()

with LengthHistory.open({file!r}) as history:
    for step in range(3):
        history.add(observe("p", [5] * 2000, step=step))
    LengthHistory(history.path, StopsBeforeCommit(history._connection)).add(observe("p", [5] * 2000, step=3))
"""
FOLDER = str(Path(__file__).parent)


def start(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_writer_killed_in_a_transaction_leaves_whole_steps_only(path: Path) -> None:
    writer = start(WRITER.format(paths=[FOLDER], file=str(path)))
    assert writer.stdout is not None
    assert writer.stdout.readline() == "in the middle\n"
    during = kept(path)
    os.kill(writer.pid, signal.SIGKILL)
    assert writer.wait(timeout=30) == -signal.SIGKILL
    after = kept(path)
    assert len(during) == len(after) == 3 * 2000
    assert {one.rollout_step for one in after} == {0, 1, 2}
    assert store(path, observe("p", [5] * 2000, step=3)) == [2000]
    assert len(kept(path)) == 4 * 2000


def test_a_file_that_another_process_is_making_is_waited_for(path: Path) -> None:
    """Turning write-ahead mode on is the one thing that SQLite does not wait for by itself."""
    path.parent.mkdir()
    maker = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    maker.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.2, maker.execute, ["ROLLBACK"])
    release.start()
    assert store(path, observe("a", [5])) == [1]
    release.join()
    maker.close()


LOOPING_WRITER = """
import sys
sys.path[:0] = {paths!r}
from length_worlds import observe
from flexfloor.scheduling.history import LengthHistory

for turn in range({turns}):
    with LengthHistory.open({file!r}) as history:
        history.add(observe("p", [7] * 50, step=turn, run_id={run!r}))
print("done", flush=True)
"""


def test_two_writers_and_a_reader_at_once_each_see_whole_steps(path: Path) -> None:
    """Both start without a file, so its creation is contended too."""
    scripts = [LOOPING_WRITER.format(paths=[FOLDER], file=str(path), turns=15, run=run) for run in ("a", "b")]
    writers = [start(script) for script in scripts]
    sizes = set()
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            with LengthHistory.open(path) as history:
                sizes.add(len(history.read("math")))
    assert [writer.returncode for writer in writers] == [0, 0]
    assert all(size % 50 == 0 for size in sizes)
    assert len(sizes) > 2
    assert len(kept(path)) == 2 * 15 * 50


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_a_damaged_file_is_an_error_that_names_file_and_fix(path: Path) -> None:
    store(path, *(observe(f"p{index}", [5] * 20, step=index) for index in range(40)))
    whole = path.read_bytes()
    page = 4096
    for offset, content in ((0, b"not a database file"), (page, b"\xff" * page), (3 * page, b"\0" * page)):
        path.write_bytes(whole)
        overwrite(path, offset, content)
        with pytest.raises(HistoryError, match="damaged") as refused:
            kept(path)
        assert str(refused.value).startswith(f"{path}: damaged")
        assert ".recover" in str(refused.value)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HistoryError, match="damaged"):
        kept(path)


def other_database(path: Path) -> None:
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE mine (a)")
    connection.commit()
    connection.close()


def newer_history(path: Path) -> None:
    store(path, observe("a", [1]))
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 7")
    connection.close()


def folder(path: Path) -> None:
    path.mkdir(parents=True)


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (other_database, "is a database of something else. Fix: name another file"),
        (newer_history, "is a history of version 7, this FlexFloor reads 1. Fix:"),
        (folder, "unable to open database file. Fix: check that the file and its folder can be written"),
    ],
)
def test_a_file_that_is_no_history_is_refused(path: Path, prepare: Callable[[Path], None], text: str) -> None:
    prepare(path)
    before = path.stat().st_size
    with pytest.raises(HistoryError) as refused, LengthHistory.open(path):
        raise AssertionError("it was opened")
    assert text in str(refused.value)
    assert str(path) in str(refused.value)
    assert path.stat().st_size == before


def test_a_reader_does_not_make_a_file(path: Path) -> None:
    with pytest.raises(HistoryError, match="no such file"), LengthHistory.open(path, must_exist=True):
        raise AssertionError("it was opened")
    assert not path.exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryError, match="name a file that can be written"):  # noqa: SIM117
        with LengthHistory.open(tmp_path / "file" / "history.sqlite"):
            raise AssertionError("it was opened")


def test_a_lock_that_is_never_given_up_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexfloor.scheduling.history.BUSY_TIMEOUT_S", 0.05)
    store(path, observe("a", [1]))
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    assert len(kept(path)) == 1
    with pytest.raises(HistoryError, match="another process has been writing"):
        store(path, observe("b", [1]))
    holder.close()


calls = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
    max_size=8,
)


@settings(max_examples=15, deadline=None)
@given(calls=calls)
def test_a_history_holds_the_last_of_each_response_in_order(
    calls: list[tuple[str, int, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("history") / "h.sqlite"
    observed = [observe("p", lengths, step=step, run_id=run) for run, step, lengths in calls]
    expected = {(one.run_id, one.response_id): one for call in observed for one in call}
    store(path, *observed)
    read = kept(path) if calls else []
    assert {(one.run_id, one.response_id): one for one in read} == expected
    assert len(read) == len(expected)
    order = list(dict.fromkeys(run for run, _, _ in calls))
    places = [(order.index(one.run_id), one.rollout_step) for one in read]
    assert places == sorted(places)
