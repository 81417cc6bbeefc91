"""Shared-memory collectives among real processes, and what becomes of a rank whose peer is gone."""

import multiprocessing
import os
import signal
import stat
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch

from sglang_patches.cpu import shm_groups
from sglang_patches.cpu.shm_collectives import PeerLostError, ProcessIdentity, Segment, SharedMemoryGroup

WORLD_SIZE = 3
SLOT_BYTES = 256
"""So small that most payloads take several exchanges."""
DEADLINE_S = 30.0

# Forked: importing torch anew in each process would take longer than all of these tests.
forked = multiprocessing.get_context("fork")

Work = Callable[[SharedMemoryGroup], object]


def _run_rank(rank: int, path: str, work: Work, pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send(ProcessIdentity.of(os.getpid()))
    group = SharedMemoryGroup.attach(path, rank, pipe.recv(), SLOT_BYTES, deadline_s=DEADLINE_S)
    try:
        pipe.send(work(group))
    except PeerLostError as error:
        pipe.send(error)


class Ranks:
    """Three processes in one group, each running the same work."""

    def __init__(self, work: Work) -> None:
        segment = Segment.create(WORLD_SIZE, SLOT_BYTES)
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(WORLD_SIZE):
            ours, theirs = forked.Pipe()
            process = forked.Process(target=_run_rank, args=(rank, segment.path, work, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        identities = [self.result(rank) for rank in range(WORLD_SIZE)]
        for pipe in self.pipes:
            pipe.send(identities)
        self.segment = segment

    def result(self, rank: int, deadline_s: float = DEADLINE_S) -> object:
        assert self.pipes[rank].poll(deadline_s), f"rank {rank} sent nothing within {deadline_s} s"
        return self.pipes[rank].recv()

    def results(self) -> list[object]:
        return [self.result(rank) for rank in range(WORLD_SIZE)]

    def stop(self) -> None:
        self.segment.close()
        for process in self.processes:
            process.kill()
            process.join(DEADLINE_S)


@pytest.fixture
def start():
    started: list[Ranks] = []

    def start_ranks(work: Work) -> Ranks:
        started.append(Ranks(work))
        return started[-1]

    yield start_ranks
    for ranks in started:
        ranks.stop()


def tensor_of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _collectives(group: SharedMemoryGroup) -> dict[str, object]:
    mine = tensor_of(group.rank, 7, 40)
    strided = tensor_of(group.rank, 6, 4).t()
    gathered = torch.empty(WORLD_SIZE * 7, 40)
    group.all_gather(gathered, mine)
    bf16 = group.all_reduce(tensor_of(group.rank, 33, dtype=torch.bfloat16))
    counts = group.all_reduce(torch.tensor([group.rank, 1]))
    return {
        "sum": group.all_reduce(mine.clone()).numpy(),
        "strided": group.all_reduce(strided).numpy(),
        "empty": group.all_reduce(torch.empty(0, 4)).shape,
        "gathered": gathered.numpy(),
        "bf16": bf16.float().numpy(),
        "counts": counts.tolist(),
        "uneven": shm_groups.reduce_scatterv(group, mine, None, [2, 0, 5]).numpy(),
        "even": shm_groups.reduce_scatterv(group, mine[:6], None, None).numpy(),
        "objects": [
            shm_groups.broadcast_objects(group, objects if group.rank == 1 else None, group.rank == 1)
            for objects in ([], ["control", {"request": "x" * 1000}])
        ],
        "many": [group.all_reduce(torch.tensor([float(step)])).item() for step in range(200)],
    }


def test_results_equal_plain_sums_on_every_rank(start) -> None:
    results = start(_collectives).results()
    parts = [tensor_of(rank, 7, 40) for rank in range(WORLD_SIZE)]
    total = parts[0] + parts[1] + parts[2]
    strided = sum((tensor_of(rank, 6, 4) for rank in range(WORLD_SIZE)), torch.zeros(6, 4)).t()
    bf16 = sum(
        (tensor_of(rank, 33, dtype=torch.bfloat16).float() for rank in range(WORLD_SIZE)), torch.zeros(33)
    )
    uneven, even = total.split([2, 0, 5]), total[:6].split(2)
    for rank, result in enumerate(results):
        assert isinstance(result, dict)
        assert (result["sum"] == total.numpy()).all(), "summed in rank order, so equal to the last bit"
        torch.testing.assert_close(torch.from_numpy(result["strided"]), strided)
        assert result["empty"] == (0, 4)
        assert (result["gathered"] == torch.cat(parts).numpy()).all()
        assert (result["bf16"] == bf16.bfloat16().float().numpy()).all()
        assert result["counts"] == [3, 3]
        assert (result["uneven"] == uneven[rank].numpy()).all()
        assert (result["even"] == even[rank].numpy()).all()
        assert result["objects"] == [[], ["control", {"request": "x" * 1000}]]
        assert result["many"] == [3.0 * step for step in range(200)]


def _lose_rank_2(group: SharedMemoryGroup) -> object:
    group.all_reduce(torch.ones(4))
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    started_s = time.monotonic()
    try:
        group.all_reduce(torch.ones(1000))
    except PeerLostError as error:
        return str(error), time.monotonic() - started_s
    return "nothing was raised", 0.0


def test_a_killed_rank_is_noticed_by_all_others(start) -> None:
    ranks = start(_lose_rank_2)
    for rank in (0, 1):
        result = ranks.result(rank)
        assert isinstance(result, tuple)
        text, took_s = result
        assert "rank 2" in text
        assert took_s < 5
    # Nobody has reaped it yet: a zombie still has its pid, and must count as dead.
    assert ranks.processes[2].exitcode == -signal.SIGKILL


def alone(deadline_s: float, num_ranks: int = 2) -> SharedMemoryGroup:
    """Rank 0 of a group whose other ranks live and never arrive."""
    segment = Segment.create(num_ranks, SLOT_BYTES)
    peers = [ProcessIdentity.of(os.getpid())] * num_ranks
    group = SharedMemoryGroup.attach(segment.path, 0, peers, SLOT_BYTES, deadline_s)
    segment.close()
    return group


def test_a_wait_has_a_deadline_and_leaves_word_for_the_others() -> None:
    group = alone(deadline_s=0.05)
    with pytest.raises(PeerLostError, match=r"rank 1 did not arrive within 0\.05 s"):
        group.all_reduce(torch.ones(1))
    group.deadline_s = DEADLINE_S
    with pytest.raises(PeerLostError, match="rank 1 was lost"):
        group.all_reduce(torch.ones(1))


def test_memory_is_private_and_vanishes() -> None:
    segment = Segment.create(2, SLOT_BYTES)
    assert stat.S_IMODE(os.stat(segment.path).st_mode) == 0o600
    group = SharedMemoryGroup.attach(segment.path, 0, [ProcessIdentity.of(os.getpid())], SLOT_BYTES)
    segment.close()
    assert not os.path.exists(segment.path)
    assert group.all_reduce(torch.tensor([2.0])).item() == 2.0, "a mapping outlives its path"


def test_another_life_of_a_pid_is_not_the_peer() -> None:
    mine = ProcessIdentity.of(os.getpid())
    assert mine.is_alive()
    assert not ProcessIdentity(pid=mine.pid, start_ticks=mine.start_ticks - 1).is_alive()
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(2**22 + 1)
