"""A rank's log of its iterations: what is in it, when it reaches the file, and how a server asks for it."""

import errno
import os
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flexfloor.iterations import RECORD
from flexfloor.rollout import iteration_log as reader
from sglang_patches import CONFIG_ENV, iteration_log, plugin_config, serve
from sglang_patches.hooks import internal_state, schedule_batch, scheduler
from sglang_patches.iteration_log import IterationLog
from sglang_patches.plugin_config import PluginConfig


def batch(kind: str, *, seq_lens: list[int] | None = None, num_requests: int = 0, extend: int = 0) -> Any:
    mode = SimpleNamespace(is_idle=lambda: kind == "idle", is_extend=lambda: kind == "extend")
    request = SimpleNamespace(origin_input_ids=[1, 2, 3], output_ids=[4, 5])
    return SimpleNamespace(
        forward_mode=mode,
        is_extend_in_batch=kind == "extend",
        reqs=[request] * (num_requests or len(seq_lens or [])),
        seq_lens_cpu=None if seq_lens is None else torch.tensor(seq_lens),
        extend_num_tokens=extend,
    )


@dataclass
class Rank:
    path: Path
    epoch: int = 0
    now_ns: int = 0
    log: IterationLog = field(init=False)

    def __post_init__(self) -> None:
        self.log = IterationLog(self.path, lambda: self.epoch, lambda: self.now_ns)

    def run(self, batch: Any, *, at_us: int) -> None:
        self.now_ns = at_us * 1000 + 1
        self.log.record(batch)

    def on_disk(self) -> list[tuple[int, ...]]:
        return [tuple(row.item()) for row in np.fromfile(self.path, RECORD)]


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path / "log.bin")


def test_the_format_is_that_of_the_carrier() -> None:
    assert iteration_log._RECORD.size == RECORD.itemsize == 20
    values = (2**32 - 1, 2, 3, 2**16 - 1, 5, 6)
    assert np.frombuffer(iteration_log._RECORD.pack(*values), RECORD)[0].item() == values


def test_each_kind_of_iteration(rank: Rank) -> None:
    rank.run(batch("extend", seq_lens=[7, 9], extend=16), at_us=100)
    rank.run(batch("decode", seq_lens=[8, 10]), at_us=350)
    rank.epoch = 4
    rank.run(batch("idle"), at_us=360)
    rank.run(batch("decode", num_requests=3), at_us=1360)
    rank.log.flush()
    assert rank.on_disk() == [
        (0, 0, 16, 0, 0, 0),
        (0, 18, 0, 2, 0, 250),
        (4, 0, 0, 0, 0, 10),
        (4, 15, 0, 3, 0, 1000),
    ]


def test_retractions_stand_in_the_next_record(rank: Rank) -> None:
    rank.log.count_retracted(2)
    rank.log.count_retracted(1)
    for at_us in (1, 2):
        rank.run(batch("idle"), at_us=at_us)
    rank.log.flush()
    assert [row[4] for row in rank.on_disk()] == [3, 0]


def test_values_that_do_not_fit_stay_at_the_end_of_their_range(rank: Rank) -> None:
    rank.log.count_retracted(70_000)
    rank.run(batch("decode", seq_lens=[1], num_requests=70_000), at_us=1)
    rank.run(batch("idle"), at_us=10**10)
    rank.log.flush()
    assert rank.on_disk() == [(0, 1, 0, 65_535, 65_535, 0), (0, 0, 0, 0, 0, 2**32 - 1)]


def test_records_are_buffered_and_all_of_them_arrive(rank: Rank) -> None:
    sizes = set()
    for number in range(1000):
        rank.run(batch("decode", seq_lens=[number]), at_us=number)
        sizes.add(rank.path.stat().st_size)
    assert len(sizes) <= 6
    rank.log.flush()
    assert [row[1] for row in rank.on_disk()] == list(range(1000))


def test_a_new_process_starts_a_new_log(rank: Rank) -> None:
    rank.run(batch("idle"), at_us=1)
    rank.log.flush()
    again = Rank(rank.path)
    assert again.on_disk() == []


def test_a_full_disk_ends_the_log_and_not_the_server(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "write", fail)
    for number in range(500):
        rank.run(batch("idle"), at_us=number)
    monkeypatch.undo()
    rank.run(batch("idle"), at_us=501)
    rank.log.flush()
    # A gap would shift every record after it.
    assert rank.on_disk() == []


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A process that serves as rank 2 with a log."""
    config = tmp_path / "plugin.json"
    config.write_text(plugin_config.dump(PluginConfig(device="cpu", iteration_log=str(tmp_path))))
    monkeypatch.setenv(CONFIG_ENV, str(config))
    monkeypatch.setattr(iteration_log, "_log", None)
    monkeypatch.setattr(iteration_log, "_is_open", False)
    monkeypatch.setattr(iteration_log, "own_rank", lambda: 2)
    monkeypatch.setattr(iteration_log, "_speaks_for_its_worker", lambda: True)
    return reader.log_path(tmp_path, 2)


def test_record_and_counter_go_together_and_an_answer_flushes(hooked: Path) -> None:
    process, controller = SimpleNamespace(), SimpleNamespace()
    controller.scheduler = process
    scheduler.count_iteration(process, batch("extend", extend=5))
    schedule_batch.count_retractions(([object(), object()], 0.5, []), SimpleNamespace())
    scheduler.count_iteration(process, batch("decode", seq_lens=[6]))
    scheduler.count_iteration(process, batch("idle"))
    assert hooked.stat().st_size == 0
    reply = SimpleNamespace(internal_state={})
    internal_state.report_iterations(reply, controller)
    counted = reply.internal_state["flexfloor"]
    rows = np.fromfile(hooked, RECORD)
    assert len(rows) == counted["num_iterations"] == 3
    assert [row.item()[:5] for row in rows] == [(0, 0, 5, 0, 0), (0, 6, 0, 1, 2), (0, 0, 0, 0, 0)]


def test_a_server_without_a_log_writes_none(hooked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(os.environ[CONFIG_ENV]).write_text(plugin_config.dump(PluginConfig(device="cpu")))
    scheduler.count_iteration(SimpleNamespace(), batch("idle"))
    assert not hooked.exists()


def test_a_process_that_ends_leaves_its_last_records(tmp_path: Path) -> None:
    """As SGLang's ranks end: a child of multiprocessing, by SystemExit."""
    script = """
import multiprocessing, sys
from pathlib import Path
from types import SimpleNamespace
from sglang_patches import iteration_log
def serve():
    iteration_log.own_rank = lambda: 0
    iteration_log._speaks_for_its_worker = lambda: True
    mode = SimpleNamespace(is_idle=lambda: True)
    iteration_log.current().record(SimpleNamespace(forward_mode=mode))
    raise SystemExit(0)
if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=serve)
    child.start(); child.join()
"""
    (tmp_path / "main.py").write_text(script)
    config = tmp_path / "plugin.json"
    config.write_text(plugin_config.dump(PluginConfig(device="cpu", iteration_log=str(tmp_path))))
    for method in ("fork", "spawn"):
        subprocess.run(
            [sys.executable, "main.py", method],
            cwd=tmp_path,
            env={**os.environ, CONFIG_ENV: str(config), "PYTHONPATH": os.getcwd()},
            timeout=60,
            check=True,
        )
        log = tmp_path / "iterations-rank0.bin"
        assert log.stat().st_size == struct.calcsize("<IIIHHI")
        log.unlink()


def test_the_servers_folder_is_made_and_emptied_of_old_logs(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "logs"
    assert serve.prepare_log_folder(str(folder)) == str(folder)
    (folder / "iterations-rank3.bin").write_bytes(b"old")
    (folder / "notes.txt").write_text("mine")
    serve.prepare_log_folder(str(folder))
    assert [file.name for file in folder.iterdir()] == ["notes.txt"]
    with pytest.raises(SystemExit, match=r"--flexfloor-iteration-log=.*notes"):
        serve.prepare_log_folder(str(folder / "notes.txt"))
