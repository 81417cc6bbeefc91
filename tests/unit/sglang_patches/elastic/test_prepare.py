"""Whole changes among ranks of one process: after each, every member serves the right weights from its slots.

The ranks' background threads are the real ones; copies go through queues instead of a torch group.
"""

import queue
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from elastic_fakes import NUM_EXPERTS, FusedMoE, Model, stand_in
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.experts.placement import ExpertPlacement, canonical, rehome
from sglang_patches.elastic import prepare
from sglang_patches.elastic.expert_slots import ExpertLayers
from sglang_patches.elastic.prepare import Plan, Preparer
from sglang_patches.elastic.transfer import Move

EP_SIZE = 4
DEADLINE_S = 60.0


Box = queue.SimpleQueue[torch.Tensor]


class Mail:
    """Copies under way, by sender, receiver and tag."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int, int], Box] = {}
        # Sender and receiver ask for the same new box at once, and must not get one each.
        self._lock = threading.Lock()

    def box(self, sender: int, receiver: int, tag: int) -> Box:
        with self._lock:
            return self._boxes.setdefault((sender, receiver, tag), queue.SimpleQueue())

    @property
    def num_unread(self) -> int:
        return sum(box.qsize() for box in self._boxes.values())


class Transfer:
    def __init__(self, ep_rank: int, mail: Mail) -> None:
        self.ep_rank = ep_rank
        self.mail = mail
        self.device = torch.device("cpu")

    def settle(self) -> None: ...

    def exchange(self, sends: Sequence[Move], receives: Sequence[Move]) -> int:
        for moves in (sends, receives):
            assert len({(move.peer, move.tag) for move in moves}) == len(moves)
        for move in sends:
            self.mail.box(self.ep_rank, move.peer, move.tag).put(move.tensor.clone())
        for move in receives:
            move.tensor.copy_(self.mail.box(move.peer, self.ep_rank, move.tag).get(timeout=DEADLINE_S))
        return sum(move.tensor.nbytes for move in receives)


class Groups:
    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []

    def coordinator(self, members: tuple[int, ...], membership_epoch: int) -> tuple[int, ...]:
        self.asked.append((members, membership_epoch))
        return members


class Rank:
    def __init__(self, ep_rank: int, mail: Mail, num_reserved_slots: int, moves_dense: bool) -> None:
        self.ep_rank = ep_rank
        block = canonical(NUM_EXPERTS, EP_SIZE).experts_on(ep_rank)
        self.model = Model([expert for expert in block if expert is not None], num_reserved_slots)
        self.experts = ExpertLayers(self.model, block, NUM_EXPERTS, num_reserved_slots=num_reserved_slots)
        self.groups = Groups()
        self.journal: list[str] = []
        self.weight_version = "7"
        self.preparer = Preparer(
            ep_rank,
            self.model,
            self.groups,  # type: ignore[arg-type]
            Transfer(ep_rank, mail),  # type: ignore[arg-type]
            self.experts,
            resume_memory=lambda: self.journal.append("resume"),
            moves_dense=moves_dense,
            weight_version=lambda: self.weight_version,
            delay=self.journal.append,
        )


class Group:
    """All ranks, and the manager's view of them."""

    def __init__(self, num_reserved_slots: int = 0, *, moves_dense: bool = False) -> None:
        self.mail = Mail()
        self.ranks = [Rank(rank, self.mail, num_reserved_slots, moves_dense) for rank in range(EP_SIZE)]
        self.placement = canonical(NUM_EXPERTS, EP_SIZE)
        self.epoch = 0

    def prepare(self, members: Sequence[int]) -> dict[int, Plan]:
        """All ranks' plans, ready to switch."""
        plans = self.start(members)
        for ep_rank, plan in plans.items():
            assert plan.ready.wait(DEADLINE_S), f"ep_rank {ep_rank} is not prepared"
        assert self.mail.num_unread == 0
        return plans

    def start(self, members: Sequence[int]) -> dict[int, Plan]:
        """All ranks' plans, in preparation."""
        self.epoch += 1
        old, new = self.placement.members, rehome(self.placement, members)
        plans = {rank: self.plan(new) for rank in sorted({*old, *members})}
        for ep_rank, plan in plans.items():
            self.ranks[ep_rank].preparer.submit(plan)
        return plans

    def plan(self, new: ExpertPlacement) -> Plan:
        return Plan(
            membership_epoch=self.epoch,
            old_members=self.placement.members,
            members=new.members,
            leavers_exit=(),
            old_placement=self.placement,
            new_placement=new,
        )

    def change(self, members: Sequence[int]) -> dict[int, Plan]:
        plans = self.prepare(members)
        for ep_rank, plan in plans.items():
            if ep_rank in members:
                assert plan.staged is not None
                self.ranks[ep_rank].experts.install(plan.staged)
            else:
                self.ranks[ep_rank].experts.release()
        self.placement = plans[members[0]].new_placement
        self.validate()
        return plans

    def validate(self) -> None:
        """Each member's map leads to slots that hold the experts the placement gives it."""
        self.placement.validate()
        for ep_rank, slots in self.placement.slots:
            model = self.ranks[ep_rank].model
            held = model.held()
            for layer in model.layers:
                slot_map = layer.dispatcher.local_expert_mapping.tolist()
                assert slot_map == list(self.placement.slot_map(ep_rank))
            assert [held[slot] for slot, expert in enumerate(slots) if expert is not None] == [
                expert for expert in slots if expert is not None
            ]


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch, moe_layers: None) -> None:
    stand_in_for_sglang(monkeypatch)


def stand_in_for_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "sglang.srt.layers.moe.fused_moe_triton.layer", FusedMoE=FusedMoE)
    monkeypatch.setattr(prepare, "gather_objects", lambda _coordinator, value: [value])


@pytest.mark.parametrize("num_reserved_slots", [0, 8])
def test_ranks_leave_one_by_one_and_return(num_reserved_slots: int) -> None:
    group = Group(num_reserved_slots)
    for members in [(0, 1, 2), (0, 2), (2,), (1, 2), (0, 1, 2, 3)]:
        group.change(members)
    assert [rank.model.held()[:2] for rank in group.ranks] == [[0, 1], [2, 3], [4, 5], [6, 7]]


MEMBERS = st.lists(st.sets(st.integers(0, EP_SIZE - 1), min_size=1).map(sorted), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(MEMBERS, st.booleans())
def test_any_changes_leave_every_expert_where_the_map_says(steps: list[list[int]], is_reserved: bool) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in_for_sglang(monkeypatch)
        group = Group(NUM_EXPERTS if is_reserved else 0)
        for members in steps:
            # Ranks leave or return in one change, never both.
            group.change(sorted({*members, *group.placement.members}))
            group.change(members)


def test_preparing_leaves_what_is_served_alone() -> None:
    group = Group()
    group.prepare((0, 1))
    group.validate()
    # It was cancelled: the next one starts from the same old group.
    group.change((0, 1, 2))


def test_each_member_gets_the_group_and_leavers_none() -> None:
    group = Group()
    plans = group.change((0, 2))
    assert [rank.groups.asked for rank in group.ranks] == [[((0, 2), 1)], [], [((0, 2), 1)], []]
    assert plans[1].staged is None
    assert plans[2].coordinator == (0, 2)


def test_bytes_are_those_received_and_what_returns_takes_its_memory_first() -> None:
    expert_bytes = 2 * (12 + 6 + 3) * 4
    group = Group()
    plans = group.change((0, 1, 2))
    assert [plans[rank].num_bytes for rank in range(4)] == [expert_bytes, expert_bytes, 0, 0]
    plans = group.change((0, 1, 2, 3))
    assert [plans[rank].num_bytes for rank in range(4)] == [0, 0, 0, 2 * expert_bytes]
    assert group.ranks[0].journal == group.ranks[2].journal == ["prepare", "prepare"]
    assert group.ranks[3].journal == ["prepare", "prepare", "resume"]


def test_dense_weights_come_from_the_first_member_where_they_are_given_back() -> None:
    group = Group(moves_dense=True)
    group.change((0, 1))
    for ep_rank in (2, 3):
        group.ranks[ep_rank].model.embed.weight.data.zero_()
    group.change((0, 1, 2, 3))
    weights = [rank.model.embed.weight for rank in group.ranks]
    assert torch.equal(weights[2], weights[0])
    assert torch.equal(weights[3], weights[0])
    assert not torch.equal(weights[1], weights[0])


def test_a_change_that_cannot_be_prepared_never_becomes_ready_and_the_next_one_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = Group()
    rank = group.ranks[0]
    real: Any = rank.groups.coordinator

    def fail_once(members: tuple[int, ...], membership_epoch: int) -> object:
        rank.groups.coordinator = real  # type: ignore[method-assign]
        raise ValueError("no such device")

    monkeypatch.setattr(rank.groups, "coordinator", fail_once)
    broken, whole = (group.plan(rehome(group.placement, [0, 1, 2, 3])) for _ in range(2))
    rank.preparer.submit(broken)
    rank.preparer.submit(whole)
    assert whole.ready.wait(DEADLINE_S)
    assert not broken.ready.is_set()
    assert "ep_rank=0 cannot prepare membership_epoch=0 members=(0, 1, 2, 3) -> (0, 1, 2, 3)" in caplog.text
    assert "no such device" in caplog.text


@pytest.mark.parametrize(
    ("others", "is_ready"),
    [([(True, "7")], True), ([(False, "7")], False), ([(True, "8")], False)],
)
def test_a_return_takes_place_only_where_all_want_it_and_serve_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, others: list[tuple[bool, str]], is_ready: bool
) -> None:
    group = Group()
    group.change((0, 1, 2))
    monkeypatch.setattr(prepare, "gather_objects", lambda _coordinator, value: [value, *others])
    plans = group.start((0, 1, 2, 3))
    for plan in plans.values():
        assert (plan.ready if is_ready else plan.dropped).wait(DEADLINE_S)
        assert plan.ready.is_set() != plan.dropped.is_set()
