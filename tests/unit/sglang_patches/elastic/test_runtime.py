"""One rank's part in membership changes, with everything around it played by hand."""

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from elastic_fakes import Batch, prepare_msg, stand_in
from elastic_rank import ALL, GROW, SHRINK, WITHOUT_3, Rank
from hypothesis import given
from hypothesis import strategies as st

from flexfloor.membership.messages import (
    CancelAnsweredMsg,
    CancelAskedMsg,
    CancelMsg,
    DrainFinishedMsg,
    ManagerLostMsg,
    OrderMsg,
    StartDrainMsg,
    StopDrainMsg,
    SwitchedMsg,
    WorkArrivedMsg,
)
from sglang_patches import iteration_log
from sglang_patches.elastic import start
from sglang_patches.hooks import dp_attn


@pytest.fixture
def survivor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    rank = made(monkeypatch, 0)
    yield rank
    rank.close()


@pytest.fixture
def leaver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    rank = made(monkeypatch, 3)
    yield rank
    rank.close()


def made(monkeypatch: pytest.MonkeyPatch, ep_rank: int) -> Rank:
    rank = Rank(ep_rank=ep_rank)
    stand_in(monkeypatch, "sglang.srt.runtime_context", get_parallel=lambda: rank.parallel)
    return rank


# Votes.


def test_without_a_plan_a_rank_votes_for_the_epoch_in_force(survivor: Rank) -> None:
    survivor.loop()
    assert survivor.gather(num_tokens=5) == 0
    assert survivor.journal == []


def test_a_survivor_votes_for_the_plan_when_it_is_prepared_whatever_it_decodes(survivor: Rank) -> None:
    survivor.loop(SHRINK)
    (plan,) = survivor.preparer.plans
    assert (plan.membership_epoch, plan.members, plan.joiners) == (1, WITHOUT_3, ())
    assert plan.new_placement == SHRINK.new_placement
    survivor.scheduler.running_batch = Batch(7)
    assert survivor.runtime.vote(num_tokens=7) == 0
    survivor.preparer.finish()
    assert survivor.runtime.vote(num_tokens=7) == 1


def test_a_leaver_votes_for_leaving_only_without_tokens_and_requests(leaver: Rank) -> None:
    leaver.loop(SHRINK)
    assert leaver.runtime.vote(num_tokens=0) == 0
    leaver.preparer.finish()
    assert leaver.runtime.vote(num_tokens=0) == 1
    assert leaver.runtime.vote(num_tokens=1) == 0
    leaver.scheduler.waiting_queue.append(object())
    assert leaver.runtime.vote(num_tokens=0) == 0
    leaver.scheduler.waiting_queue.clear()
    assert leaver.runtime.vote(num_tokens=0) == 1


@given(votes=st.lists(st.sampled_from([-1, 0, 1, 2]), min_size=1, max_size=4) | st.just([1, 1, 1, 1]))
def test_the_group_switches_exactly_when_all_vote_for_the_plan(votes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        rank = made(monkeypatch, 0).prepared()
        rank.gather(votes)
        assert rank.journal == []
        rank.loop()
    is_agreed = set(votes) == {1}
    assert bool(rank.sent(SwitchedMsg)) is is_agreed
    assert (rank.parallel.values["tp_size"] == 3) is is_agreed
    rank.close()


def test_votes_without_a_plan_mean_nothing(survivor: Rank) -> None:
    survivor.gather([1, 1, 1, 1])
    survivor.loop()
    assert survivor.journal == []


def test_the_gather_carries_the_vote_in_a_column_of_its_own(
    survivor: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_current", survivor.runtime)
    survivor.prepared()
    info = SimpleNamespace(num_tokens=3, tp0_info_cpu=torch.tensor([[3, 1], [5, 1], [0, 1], [9, 1]]))
    assert dp_attn.add_vote(torch.tensor([3, 8]), info).tolist() == [3, 8, 1]
    assert dp_attn.add_no_vote(torch.tensor([0, 8]), info).tolist() == [0, 8, -1]
    dp_attn.read_votes(None, info)
    survivor.loop()
    assert survivor.journal == ["restamp", "install", "SwitchedMsg"]


def test_before_the_runtime_is_made_a_rank_votes_for_the_group_it_was_started_with() -> None:
    info = SimpleNamespace(num_tokens=3, tp0_info_cpu=torch.tensor([[3, 0]]))
    assert start.current() is None
    assert dp_attn.add_vote(torch.tensor([3, 8]), info).tolist() == [3, 8, 0]
    dp_attn.read_votes(None, info)


# Cancels.


def test_a_cancel_before_the_agreement_drops_the_plan(survivor: Rank) -> None:
    survivor.prepared()
    survivor.gather([1, 1, 1, 0])
    survivor.loop(CancelMsg(membership_epoch=1))
    assert survivor.link.sent == [CancelAnsweredMsg(membership_epoch=1, dropped=True)]
    # From now on it votes against, so nobody can agree on it any more.
    assert survivor.gather() == 0
    survivor.loop()
    assert survivor.sent(SwitchedMsg) == []


def test_a_cancel_after_the_agreement_comes_too_late(survivor: Rank) -> None:
    survivor.prepared()
    survivor.gather()
    survivor.loop(CancelMsg(membership_epoch=1))
    assert survivor.journal == ["restamp", "install", "SwitchedMsg", "CancelAnsweredMsg"]
    assert survivor.sent(CancelAnsweredMsg) == [CancelAnsweredMsg(membership_epoch=1, dropped=False)]


def test_a_cancel_of_a_plan_that_never_came_keeps_it_from_ever_being_agreed(survivor: Rank) -> None:
    survivor.loop(CancelMsg(membership_epoch=5))
    assert survivor.link.sent == [CancelAnsweredMsg(membership_epoch=5, dropped=True)]


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_change_that_brings_ranks_back_is_settled_once_it_is_prepared(
    survivor: Rank, is_ready: bool
) -> None:
    """The rank that returns waits in the new group by then, so all settle together, and only then answer."""
    survivor.loop(GROW)
    (plan,) = survivor.preparer.plans
    survivor.loop(CancelMsg(membership_epoch=2))
    assert survivor.link.sent == []
    assert plan.is_withdrawn
    (plan.ready if is_ready else plan.dropped).set()
    survivor.loop()
    survivor.loop()
    assert survivor.link.sent == [CancelAnsweredMsg(membership_epoch=2, dropped=not is_ready)]
    assert survivor.gather() == (2 if is_ready else 0)


def test_after_a_cancel_the_next_plan_goes_through(survivor: Rank) -> None:
    survivor.prepared()
    survivor.loop(CancelMsg(membership_epoch=1))
    survivor.prepared(prepare_msg(2, ALL, WITHOUT_3))
    assert survivor.gather() == 2
    survivor.loop()
    assert [message.membership_epoch for message in survivor.sent(SwitchedMsg)] == [2]


def test_a_busy_leaver_asks_once_to_cancel(leaver: Rank) -> None:
    leaver.prepared()
    leaver.scheduler.waiting_queue.append(object())
    for _ in range(3):
        leaver.loop()
    assert leaver.link.sent == [CancelAskedMsg(membership_epoch=1)]
    leaver.loop(CancelMsg(membership_epoch=1), prepare_msg(2, ALL, WITHOUT_3))
    assert leaver.sent(CancelAskedMsg) == [CancelAskedMsg(membership_epoch=epoch) for epoch in (1, 2)]


def test_neither_a_busy_survivor_nor_a_drained_leaver_asks_to_cancel(survivor: Rank, leaver: Rank) -> None:
    survivor.scheduler.running_batch = Batch(3)
    for rank in (survivor, leaver):
        rank.prepared()
        rank.loop()
        assert rank.sent(CancelAskedMsg) == []


# Drains.


def test_a_drained_rank_says_so_once_and_again_after_late_work(leaver: Rank) -> None:
    work = leaver.scheduler.waiting_queue
    work.append(object())
    leaver.loop(StartDrainMsg())
    assert leaver.link.sent == []
    work.clear()
    for _ in range(3):
        leaver.loop()
    assert leaver.link.sent == [DrainFinishedMsg()]
    work.append(object())
    leaver.loop()
    work.clear()
    for _ in range(3):
        leaver.loop()
    assert leaver.link.sent == [DrainFinishedMsg()] * 2


def test_only_a_draining_rank_says_that_it_has_nothing(leaver: Rank) -> None:
    leaver.loop()
    assert leaver.link.sent == []
    leaver.loop(StartDrainMsg(), StopDrainMsg())
    assert leaver.link.sent == []
    leaver.loop(StartDrainMsg())
    leaver.loop(StopDrainMsg())
    leaver.loop(StartDrainMsg())
    assert leaver.link.sent == [DrainFinishedMsg()] * 2


def test_a_leaver_whose_work_cancelled_the_change_reports_the_end_of_that_work(leaver: Rank) -> None:
    leaver.loop(StartDrainMsg())
    leaver.prepared()
    leaver.scheduler.waiting_queue.append(object())
    leaver.loop()
    leaver.loop(CancelMsg(membership_epoch=1))
    leaver.scheduler.waiting_queue.clear()
    leaver.loop()
    assert [type(message) for message in leaver.link.sent] == [
        DrainFinishedMsg, CancelAskedMsg, CancelAnsweredMsg, DrainFinishedMsg,
    ]  # fmt: skip


# Switches.


def test_a_survivor_switches_group_then_experts_then_reports(survivor: Rank) -> None:
    survivor.prepared()
    survivor.gather()
    survivor.loop()
    assert survivor.journal == ["restamp", "install", "SwitchedMsg"]
    (switched,) = survivor.link.sent
    assert isinstance(switched, SwitchedMsg)
    assert (switched.membership_epoch, switched.num_bytes) == (1, 64)
    assert 0 < switched.stall_s < 1
    group = survivor.preparer.plans[0].coordinator
    assert survivor.parallel.values == {
        "tp_group": group, "moe_ep_group": group,
        "tp_size": 3, "attn_dp_size": 3, "moe_ep_size": 3, "ep_size": 3, "num_dp_ranks": 3,
        "tp_rank": 0, "attn_dp_rank": 0, "moe_ep_rank": 0,
    }  # fmt: skip
    scheduler = survivor.scheduler
    assert (scheduler.tp_group, scheduler.tp_cpu_group, scheduler.tp_size) == (group, group.cpu_group, 3)
    assert scheduler.weight_updater.tp_group is group
    assert not hasattr(scheduler.weight_updater, "tp_cpu_group")


def leave_and_return(rank: Rank, *, batches: list[list[OrderMsg]]) -> None:
    """Agree on leaving; while parked the rank gets these batches of orders, one each time it wakes."""
    rank.preparer.is_quick = True
    rank.loop(SHRINK)
    rank.gather()
    rank.link.batches.extend(batches)
    rank.runtime.at_loop_top()


def test_a_leaver_frees_its_memory_reports_parks_and_returns_in_the_next_group(leaver: Rank) -> None:
    leaver.scheduler.result_queue.append((Batch(1, is_idle=True), "idle pass"))
    leave_and_return(leaver, batches=[[], [GROW]])
    assert leaver.journal == [
        "take in idle pass", "release", "SwitchedMsg", "restamp", "install", "SwitchedMsg",
    ]  # fmt: skip
    assert [message.membership_epoch for message in leaver.sent(SwitchedMsg)] == [1, 2]
    assert leaver.gather() == 2
    assert leaver.link.num_beats >= 4


def test_a_leavers_log_is_on_disk_before_it_waits_and_its_epoch_is_the_one_in_force(
    leaver: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iteration_log, "flush", lambda: leaver.journal.append("flush"))
    assert leaver.runtime.membership_epoch == 0
    leaver.prepared()
    leaver.gather()
    # The iteration in which all agree still runs in the old group.
    assert leaver.runtime.membership_epoch == 0
    leaver.link.batches.extend([[], [GROW]])
    leaver.preparer.is_quick = True
    leaver.runtime.at_loop_top()
    assert leaver.journal[:3] == ["flush", "release", "SwitchedMsg"]
    assert leaver.runtime.membership_epoch == 2


def test_a_rank_that_returned_no_longer_drains(leaver: Rank) -> None:
    leaver.loop(StartDrainMsg())
    leave_and_return(leaver, batches=[[GROW]])
    leaver.scheduler.waiting_queue.append(object())
    leaver.loop()
    leaver.scheduler.waiting_queue.clear()
    leaver.loop()
    assert leaver.sent(DrainFinishedMsg) == [DrainFinishedMsg()]


def test_work_wakes_a_parked_rank_once(leaver: Rank) -> None:
    os.eventfd_write(leaver.scheduler.request_receiver.recv_from_tokenizer, 1)
    leave_and_return(leaver, batches=[[], [], [], [GROW]])
    assert leaver.sent(WorkArrivedMsg) == [WorkArrivedMsg()]
    assert leaver.journal[:3] == ["release", "SwitchedMsg", "WorkArrivedMsg"]


def test_without_work_a_parked_rank_says_nothing(leaver: Rank) -> None:
    leave_and_return(leaver, batches=[[], [], [GROW]])
    assert leaver.sent(WorkArrivedMsg) == []


def test_a_parked_rank_stays_where_a_change_of_others_leaves_it(leaver: Rank) -> None:
    others = prepare_msg(2, WITHOUT_3, (0, 1))
    back = prepare_msg(3, WITHOUT_3, ALL)
    leave_and_return(leaver, batches=[[others], [CancelMsg(membership_epoch=2)], [back]])
    assert leaver.sent(CancelAnsweredMsg) == [CancelAnsweredMsg(membership_epoch=2, dropped=True)]
    assert [message.membership_epoch for message in leaver.sent(SwitchedMsg)] == [1, 3]


def test_a_leaver_that_is_to_exit_says_goodbye_last_and_ends_well(leaver: Rank) -> None:
    leaver.prepared(prepare_msg(1, ALL, WITHOUT_3, leavers_exit=[3]))
    leaver.gather()
    with pytest.raises(SystemExit) as ended:
        leaver.loop()
    assert ended.value.code == 0
    assert leaver.journal == ["release", "SwitchedMsg", "close"]


# The manager.


def test_each_loop_top_is_a_sign_of_life(survivor: Rank) -> None:
    for _ in range(3):
        survivor.loop()
    assert survivor.link.num_beats == 3


def test_a_rank_without_its_manager_ends(survivor: Rank, leaver: Rank) -> None:
    with pytest.raises(RuntimeError, match="ep_rank=0: the membership manager is gone"):
        survivor.loop(ManagerLostMsg(reason="silent"))
    with pytest.raises(RuntimeError, match="ep_rank=3: the membership manager is gone"):
        leave_and_return(leaver, batches=[[], [ManagerLostMsg(reason="silent")]])
