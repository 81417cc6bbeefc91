"""The ledger file: torn tails at every byte, damage in the middle, kills, resume."""

import subprocess
import sys
from pathlib import Path

import pytest

from flexfloor.errors import LedgerError, StaleWeightsError
from flexfloor.records import Aborted, Finished, LedgerRecord, Progress, StepOpened, Submitted
from flexfloor.rollout.ledger import Ledger, read_ledger, step_path
from flexfloor.types import FinishReason, Response

PROMPT = (5, 6, 7)


def submitted(name: str, attempt: int = 1, dp_rank: int = 2) -> Submitted:
    prompt = PROMPT if attempt == 1 else ()
    return Submitted(name, attempt, dp_rank, 10.0 + attempt, "p1", 3, 8, 77, prompt)


def finished(name: str, attempt: int = 1, num_tokens: int = 3, version: int = 7) -> Finished:
    return Finished(name, attempt, 2, version, FinishReason.stop, num_tokens, 8, 11.0, 14.3)


STORY: list[LedgerRecord] = [
    submitted("a"),
    Progress("a", 1, 0, [1, 300], [-0.5, -0.25]),
    Aborted("a", 1, 2, 12.0, 2, "lost"),
    submitted("b"),
    submitted("a", attempt=2),
    Progress("a", 2, 2, [70_000], [-2.0]),
    finished("a", attempt=2),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed ledger that holds STORY."""
    path = step_path(tmp_path, 4)
    with Ledger.open(path, rollout_step=4, weight_version=7, num_responses=2) as ledger:
        for record in STORY:
            assert ledger.append(record)
    return path


def reopen(path: Path, rollout_step: int = 4, weight_version: int = 7) -> Ledger:
    return Ledger.open(path, rollout_step=rollout_step, weight_version=weight_version, num_responses=2)


def last_record_bytes(path: Path) -> int:
    """Size of STORY's last record on disk, from a ledger without it."""
    shorter = path.with_name("shorter")
    with reopen(shorter) as ledger:
        for record in STORY[:-1]:
            ledger.append(record)
    return path.stat().st_size - shorter.stat().st_size


def test_step_path_sorts_by_step(tmp_path: Path) -> None:
    assert step_path(tmp_path, 12).name == "step-000012.ledger"


def test_what_was_written_is_read_back(path: Path) -> None:
    contents = read_ledger(path)
    contents.state.validate()
    assert (contents.num_records, contents.torn_bytes) == (len(STORY) + 1, 0)
    assert contents.state.finished_responses() == (
        Response(
            response_id="a",
            rollout_step=4,
            prompt_id="p1",
            sample_index=3,
            prompt_token_ids=PROMPT,
            token_ids=(1, 300, 70_000),
            logprobs=(-0.5, -0.25, -2.0),
            dp_rank=2,
            weight_version=7,
            finish_reason=FinishReason.stop,
            cap_tokens=8,
            started_at_s=11.0,
            finished_at_s=14.3,
            num_attempts=2,
        ),
    )
    assert contents.state.responses["b"].is_running


def test_a_tail_torn_at_any_byte_is_left_aside_and_cut_on_reopening(path: Path) -> None:
    whole, size = path.read_bytes(), last_record_bytes(path)
    assert size > 20
    for kept in range(size):
        data = whole[: len(whole) - size + kept]
        path.write_bytes(data)
        contents = read_ledger(path)
        assert (contents.num_records, contents.torn_bytes) == (len(STORY), kept)
        assert contents.state.num_finished == 0
        with reopen(path) as ledger:
            assert ledger.append(STORY[-1])
        assert path.read_bytes() == whole


def test_a_tail_of_zeros_is_torn(path: Path) -> None:
    whole, size = path.read_bytes(), last_record_bytes(path)
    for kept in range(0, size, 5):
        path.write_bytes(whole[: len(whole) - size + kept] + bytes(4096))
        contents = read_ledger(path)
        assert contents.num_records == len(STORY)
        assert contents.torn_bytes == kept + 4096
        with reopen(path) as ledger:
            assert ledger.append(STORY[-1])
        assert path.read_bytes() == whole


def test_a_flipped_bit_anywhere_before_the_last_record_is_refused(path: Path) -> None:
    whole, size = path.read_bytes(), last_record_bytes(path)
    for offset in range(len(whole) - size):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x10]) + whole[offset + 1 :])
        with pytest.raises(LedgerError, match=r"damaged near byte|is not a ledger"):
            read_ledger(path)


def test_an_empty_file_and_a_torn_magic_begin_anew(tmp_path: Path) -> None:
    for kept in range(8):
        path = tmp_path / str(kept)
        path.write_bytes(b"FFLEDGR1"[:kept])
        assert read_ledger(path).torn_bytes == kept
        with reopen(path) as ledger:
            assert ledger.append(submitted("a"))
        assert read_ledger(path).num_records == 2


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"do not touch me")
    with pytest.raises(LedgerError, match="is not a ledger"):
        reopen(path)
    assert path.read_bytes() == b"do not touch me"


@pytest.mark.parametrize(("rollout_step", "weight_version"), [(5, 7), (4, 8)])
def test_a_ledger_goes_on_under_its_own_step_and_version_only(
    path: Path, rollout_step: int, weight_version: int
) -> None:
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=r"=\(4, 7, 2\), not "):
        reopen(path, rollout_step, weight_version)
    assert path.read_bytes() == before


def test_duplicates_and_late_records_are_counted_and_not_written(path: Path) -> None:
    with reopen(path) as ledger:
        assert not ledger.append(finished("a", attempt=2))
        assert not ledger.append(Progress("a", 1, 0, [1], [-1.0]))
        assert not ledger.append(Aborted("a", 1, 2, 13.0, 2, "late"))
        assert (ledger.state.num_duplicates, ledger.state.num_late) == (1, 2)
    assert read_ledger(path).num_records == len(STORY) + 1


def test_duplicates_in_a_file_are_dropped_and_counted(path: Path) -> None:
    whole, size = path.read_bytes(), last_record_bytes(path)
    path.write_bytes(whole + whole[-size:])
    contents = read_ledger(path)
    assert (contents.state.num_duplicates, contents.state.num_finished) == (1, 1)
    contents.state.validate()


def test_a_response_of_another_version_is_refused_and_not_written(path: Path) -> None:
    with reopen(path) as ledger:
        ledger.append(Progress("b", 1, 0, [9], [-1.0]))
        with pytest.raises(StaleWeightsError, match="made by weight_version 6, rollout step 4 runs on 7"):
            ledger.append(finished("b", num_tokens=1, version=6))
    assert read_ledger(path).state.num_finished == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (Progress("zz", 1, 0, [1], [-1.0]), "zz was never submitted"),
        (Progress("b", 2, 0, [1], [-1.0]), "this attempt was never submitted"),
        (Progress("b", 1, 0, [1, 2], [-1.0]), "2 tokens, 1 logprobs"),
        (Progress("b", 1, 1, [1], [-1.0]), "at offset 1 do not fit after 0 tokens"),
        (Progress("b", 1, 0, [1] * 9, [-1.0] * 9), "under the cap 8"),
        (finished("b", num_tokens=1), "1 tokens, but 0 on record"),
        (submitted("b"), "running in attempt 1 on dp_rank 2 does not accept it"),
        (submitted("b", attempt=2), "does not accept it"),
        (submitted("a", attempt=3), "finished in attempt 2"),
        (submitted("c", attempt=2), "attempt 1 is missing"),
        (StepOpened(1, 4, 7, 2, 0.0, 0.0), "opened twice"),
    ],
)
def test_contradictions_are_refused_with_their_story_and_not_written(
    path: Path, record: LedgerRecord, message: str
) -> None:
    before = path.read_bytes()
    with reopen(path) as ledger, pytest.raises(LedgerError, match=message):
        ledger.append(record)
    assert path.read_bytes() == before


def test_an_unfinished_response_is_not_handed_out(path: Path) -> None:
    with pytest.raises(LedgerError, match="b has not finished"):
        read_ledger(path).state.response("b")


def test_closing_makes_it_durable_once(tmp_path: Path, fsyncs: list[int]) -> None:
    ledger = reopen(tmp_path / "l")
    ledger.append(submitted("a"))
    assert fsyncs == []
    ledger.close()
    ledger.close()
    assert len(fsyncs) == 1


def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    """SIGKILL right after append, without close or sync."""
    path = tmp_path / "l"
    script = f"""
import os, signal
from pathlib import Path
from flexfloor.records import Progress, Submitted
from flexfloor.rollout.ledger import Ledger
ledger = Ledger.open(Path({str(path)!r}), rollout_step=4, weight_version=7, num_responses=2)
ledger.append(Submitted("a", 1, 0, 1.0, "p", 0, 9, 7, (1, 2)))
ledger.append(Progress("a", 1, 0, [4, 5], [-1.0, -2.0]))
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert ended.returncode == -9
    contents = read_ledger(path)
    assert contents.torn_bytes == 0
    assert contents.state.responses["a"].token_ids == [4, 5]
