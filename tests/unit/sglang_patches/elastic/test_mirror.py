"""The host mirror of experts, written by one process and read by another after the first was killed."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
import torch
from elastic_fakes import Model, stand_in

from sglang_patches.elastic.expert_slots import ExpertLayers
from sglang_patches.elastic.mirror import ExpertMirrors, MirrorUnusable

DEADLINE_S = 60.0
forked = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_fakes import FusedMoE

    stand_in(monkeypatch, "sglang.srt.layers.moe.fused_moe_triton.layer", FusedMoE=FusedMoE)


def exchange_over(pipe: Connection, ep_rank: int):  # type: ignore[no-untyped-def]
    def exchange(value: object) -> list[object]:
        pipe.send(value)
        assert pipe.poll(DEADLINE_S)
        other = pipe.recv()
        return [value, other] if ep_rank == 0 else [other, value]

    return exchange


def _peer(pipe: Connection, versions: list[str], *, dies_while_writing: bool) -> None:
    """ep_rank 1, with experts 2 and 3."""
    experts = ExpertLayers(Model([2, 3]), (2, 3), 4)
    mirrors = ExpertMirrors(experts, 1, (2, 3), exchange_over(pipe, 1))
    for version in versions:
        mirrors.write(version)
    if dies_while_writing:
        mirrors.invalidate()
    pipe.send("written")
    pipe.recv()


@contextmanager
def own_and_lost(
    versions: list[str], *, dies_while_writing: bool = False
) -> Iterator[tuple[ExpertLayers, ExpertMirrors]]:
    """ep_rank 0 with experts 0 and 1; ep_rank 1 has written its mirror and is dead."""
    ours, theirs = forked.Pipe()
    process = forked.Process(
        target=_peer, args=(theirs, versions), kwargs={"dies_while_writing": dies_while_writing}, daemon=True
    )
    process.start()
    theirs.close()
    try:
        experts = ExpertLayers(Model([0, 1]), (0, 1), 4)
        mirrors = ExpertMirrors(experts, 0, (0, 1), exchange_over(ours, 0))
        assert ours.poll(DEADLINE_S)
        assert ours.recv() == "written"
    finally:
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join(DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL
    yield experts, mirrors


def restore(experts: ExpertLayers, mirrors: ExpertMirrors, version: str) -> int:
    staged = experts.stage((0, 1, 3, 2))
    num_bytes = mirrors.restore(
        [(2, 3), (3, 2)], version, lambda layer, slot: experts.tensors_to_fill(staged, layer, slot)
    )
    experts.install(staged)
    return num_bytes


def test_a_dead_ranks_experts_come_back_bit_by_bit() -> None:
    with own_and_lost(["7", "8"]) as (experts, mirrors):
        num_bytes = restore(experts, mirrors, "8")
        assert experts.slots == (0, 1, 3, 2)
        whole = ExpertLayers(Model([0, 1, 3, 2]), (0, 1, 3, 2), 4)
        for mine, wanted in zip(experts.tensors(), whole.tensors(), strict=True):
            assert torch.equal(mine, wanted)
        assert num_bytes == sum(tensor[2:].nbytes for tensor in whole.tensors())


def test_a_mirror_of_another_version_is_refused_with_both() -> None:
    both = r"version 7, .* 8 is"
    with own_and_lost(["7"]) as (experts, mirrors), pytest.raises(MirrorUnusable, match=both):
        restore(experts, mirrors, "8")


def test_a_rank_that_died_while_it_wrote_leaves_a_mirror_of_no_version() -> None:
    with (
        own_and_lost(["7"], dies_while_writing=True) as (experts, mirrors),
        pytest.raises(MirrorUnusable, match="never finished"),
    ):
        restore(experts, mirrors, "7")


def test_a_changed_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with own_and_lost(["7"]) as (experts, mirrors):
        mirror = mirrors._mirrors[1]
        _, offset, _, _ = list(mirrors._layout.places(1))[-1]
        mirror[offset] ^= 1
        with pytest.raises(MirrorUnusable, match=r"expert 3 of MoE layer 1.* has checksum"):
            restore(experts, mirrors, "7")


def test_an_expert_of_another_host_is_refused() -> None:
    with own_and_lost(["7"]) as (experts, mirrors):
        mirrors._mirrors.pop(1)
        with pytest.raises(MirrorUnusable, match="ep_rank 1 on another host"):
            restore(experts, mirrors, "7")


def test_nothing_is_left_in_the_file_system() -> None:
    before = set(os.listdir("/dev/shm"))
    with own_and_lost(["7"]):
        assert set(os.listdir("/dev/shm")) == before
