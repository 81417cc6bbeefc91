"""Groups under agreed names and copies between ranks, over gloo among real processes.

Each rank has made another number of torch groups before: by torch's own names they would not find each other.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from elastic_fakes import stand_in
from torch.distributed import distributed_c10d

from sglang_patches.cpu.gloo import share_device
from sglang_patches.elastic.failures import is_group_failure
from sglang_patches.elastic.groups import GroupBroken, GroupFactory
from sglang_patches.elastic.transfer import Move, TransferGroup

WORLD_SIZE = 3
DEADLINE_S = 60.0

# Forked: importing torch anew in each process would take longer than all of these tests.
forked = multiprocessing.get_context("fork")

Work = Callable[[GroupFactory, int], object]


def _store(folder: Path, name: str) -> Any:
    return torch._C._distributed_c10d.FileStore(str(folder / name))


def _run_rank(rank: int, folder: Path, work: Work, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "world"), WORLD_SIZE), rank=rank, world_size=WORLD_SIZE
    )
    # What torch's next name is made of, as if this rank had made so many groups that others had no part in.
    distributed_c10d._world.group_count += rank
    share_device()
    pipe.send(work(GroupFactory(lambda: _store(folder, "groups"), timeout_s=DEADLINE_S), rank))


class Ranks:
    def __init__(self, folder: Path, work: Work) -> None:
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(WORLD_SIZE):
            ours, theirs = forked.Pipe()
            process = forked.Process(target=_run_rank, args=(rank, folder, work, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def results(self) -> list[Any]:
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(DEADLINE_S), f"rank {rank} sent nothing within {DEADLINE_S} s"
        return [pipe.recv() for pipe in self.pipes]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(DEADLINE_S)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[Work], list[Any]]]:
    started: list[Ranks] = []

    def run_ranks(work: Work) -> list[Any]:
        started.append(Ranks(tmp_path, work))
        return started[-1].results()

    yield run_ranks
    for ranks in started:
        ranks.stop()


def _own_names(factory: GroupFactory, rank: int) -> str:
    try:
        group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=1))
        dist.barrier(group=group)
    except RuntimeError as error:
        return f"failed: {error}"
    return "connected"


def test_by_torchs_own_names_the_ranks_do_not_find_each_other(run: Callable[[Work], list[Any]]) -> None:
    """So the tests below can fail."""
    assert all(result.startswith("failed: ") for result in run(_own_names))


def _sum_and_exchange(factory: GroupFactory, rank: int) -> object:
    members = (0, 2)
    total = torch.tensor([float(10**rank)])
    names = []
    if rank in members:
        group = factory.process_group(members, "some:name", "gloo")
        dist.all_reduce(total, group=group)
        names = [group.group_name, group.group_desc, distributed_c10d._world.pg_group_ranks[group]]
    transfer = TransferGroup(factory, range(WORLD_SIZE), torch.device("cpu"))
    left, right = (rank - 1) % WORLD_SIZE, (rank + 1) % WORLD_SIZE
    filled = {tag: torch.zeros(2, dtype=torch.float64 if tag == 7 else torch.float32) for tag in (3, 7)}
    num_bytes = transfer.exchange(
        [Move(torch.full_like(filled[tag], 100.0 * rank + tag), right, tag) for tag in (7, 3)],
        [Move(filled[tag], left, tag) for tag in (3, 7)],
    )
    assert transfer.exchange([], []) == 0
    return total.item(), names, num_bytes, [filled[tag].tolist() for tag in (3, 7)]


def test_named_groups_connect_and_copies_find_their_tag(run: Callable[[Work], list[Any]]) -> None:
    named = ["some:name", "some:name", {0: 0, 2: 1}]
    for rank, (total, names, num_bytes, filled) in enumerate(run(_sum_and_exchange)):
        assert (total, names) == ((10.0, []) if rank == 1 else (101.0, named))
        assert num_bytes == 2 * 4 + 2 * 8
        left = (rank - 1) % WORLD_SIZE
        assert filled == [[100.0 * left + 3] * 2, [100.0 * left + 7] * 2]


class Coordinator:
    """SGLang's GroupCoordinator: makes its two groups with torch's function."""

    def __init__(self, ranks: list[int], backend: str, group_name: str) -> None:
        self.device = torch.device("cpu")
        self.world_size = len(ranks)
        self.device_group = dist.new_group(ranks, backend=backend, group_desc=f"{group_name}:device")
        self.cpu_group = dist.new_group(ranks, backend="gloo", group_desc=f"{group_name}:cpu")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self.device_group)


def _coordinators(factory: GroupFactory, rank: int) -> object:
    with pytest.MonkeyPatch.context() as monkeypatch:
        launched = SimpleNamespace(local_rank=rank, device_group=dist.group.WORLD)
        parallel = SimpleNamespace(world_group=launched)

        def make(
            group_ranks: list[list[int]], local_rank: int, backend: str, *, group_name: str
        ) -> Coordinator:
            assert local_rank == rank
            return Coordinator(group_ranks[0], backend, group_name)

        stand_in(monkeypatch, "sglang.srt.runtime_context", get_parallel=lambda: parallel)
        stand_in(monkeypatch, "sglang.srt.distributed.parallel_state", init_model_parallel_group=make)
        stand_in(
            monkeypatch,
            "sglang.srt.distributed",
            parallel_state=SimpleNamespace(init_model_parallel_group=make),
        )
        factory.keep((0, 1, 2), "launched")
        made: dict[tuple[int, ...], Any] = {}
        for epoch, members in enumerate([(0, 2), (0, 1, 2), (1, 2), (0, 2)], start=4):
            if rank in members:
                made[members] = factory.coordinator(members, epoch)
                assert factory.coordinator(members, epoch + 10) is made[members]
        # Other callers of this thread get torch's again.
        assert dist.new_group([rank], use_local_synchronization=True).group_name != ""
    assert made.pop((0, 1, 2)) == "launched"
    return {key: [one.device_group.group_name, one.cpu_group.group_name] for key, one in made.items()}


def test_a_coordinator_is_made_once_and_named_by_its_members_and_first_epoch(
    run: Callable[[Work], list[Any]],
) -> None:
    first = ["flexfloor:0.2:4:0:device", "flexfloor:0.2:4:0:cpu"]
    second = ["flexfloor:1.2:6:0:device", "flexfloor:1.2:6:0:cpu"]
    assert run(_coordinators) == [{(0, 2): first}, {(1, 2): second}, {(0, 2): first, (1, 2): second}]


def _broken_by_order(factory: GroupFactory, rank: int) -> object:
    """Rank 2 never comes; the other two wait for it until a thread of theirs breaks the group."""
    group = factory.process_group((0, 1, 2), "waits", "gloo")
    transfer = TransferGroup(factory, (0, 1, 2), torch.device("cpu"))
    store = factory._stores[-1]
    if rank == 2:
        # Alive, so that its closed connections end nobody's wait.
        store.wait(["over"], timedelta(seconds=DEADLINE_S))
        return "did not come"
    threading.Timer(0.3, factory.break_all).start()
    ended = []
    waits: list[Callable[[], object]] = [
        lambda: dist.barrier(group=group),
        lambda: transfer.exchange([], [Move(torch.zeros(1), 2, 0)]),
    ]
    for wait in waits:
        try:
            wait()
        except Exception as error:
            ended.append(is_group_failure(error))
    assert factory.era == 1
    store.set("over", "")
    factory.renew_store()
    # The two make the next group, by another name in the same store.
    after = TransferGroup(factory, (0, 1), torch.device("cpu"), generation=1)
    filled = torch.zeros(1)
    after.exchange([Move(torch.full((1,), 5.0 + rank), 1 - rank, 1)], [Move(filled, 1 - rank, 1)])
    return ended, filled.item()


def test_a_break_ends_every_wait_and_the_rest_make_the_next_group(run: Callable[[Work], list[Any]]) -> None:
    assert run(_broken_by_order) == [([True, True], 6.0), ([True, True], 5.0), "did not come"]


def _broken_while_made(factory: GroupFactory, rank: int) -> object:
    """Rank 2 never comes to the rendezvous; the thread that waits there is given up, not waited for."""
    store = factory._stores[-1]
    if rank == 2:
        store.wait(["over"], timedelta(seconds=DEADLINE_S))
        return "did not come"
    outcome: list[Exception] = []

    def make() -> None:
        try:
            factory.process_group((0, 1, 2), "never", "gloo")
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    factory.break_all()
    factory.renew_store()
    group = factory.process_group((0, 1), "next", "gloo")
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total, group=group)
    store.set("over", "")
    return total.item(), all(isinstance(error, GroupBroken) for error in outcome)


def test_a_group_that_cannot_be_made_does_not_hold_up_the_next_one(run: Callable[[Work], list[Any]]) -> None:
    assert run(_broken_while_made) == [(3.0, True), (3.0, True), "did not come"]
