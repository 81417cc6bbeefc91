"""Changes that are cancelled or fail, fences and weights: one situation each."""

import pytest
from group_driver import GroupDriver, finished, only, states

from flexfloor.membership import commands as c
from flexfloor.membership.change import Phase
from flexfloor.membership.state import InvalidTransition, Outcome


def test_drained_rank_that_gets_work_has_to_drain_again() -> None:
    group = GroupDriver()
    group.fence("control")
    group.release(1)
    group.drained(1)
    assert group.work(1) == []
    assert group.unfence("control") == []
    (prepare,) = group.drained(1)
    assert prepare.members == (0, 2, 3)


def test_leaver_with_work_cancels_and_the_next_change_has_a_new_epoch() -> None:
    group = GroupDriver()
    group.fence("control")
    group.release(1, 2)
    group.drained(1)
    group.drained(2)
    group.unfence("control")
    assert group.ask_cancel(1, 1) == [c.Cancel(membership_epoch=1, targets=(0, 1, 2, 3))]
    for ep_rank in (0, 1, 3):
        assert group.answer(ep_rank, 1, dropped=True) == []
    (prepare,) = group.answer(2, 1, dropped=True)
    assert (prepare.membership_epoch, prepare.members) == (2, (0, 1, 3))
    assert states(group) == "sdds"
    group.all_switched(0, 1, 2, 3, epoch=2)
    (prepare,) = group.drained(1)
    assert prepare.membership_epoch == 3


def test_drain_that_ends_during_the_cancel_is_not_lost() -> None:
    group = GroupDriver()
    group.release(1)
    group.drained(1)
    group.ask_cancel(1, 1)
    group.drained(1)
    for ep_rank in (0, 1, 2):
        group.answer(ep_rank, 1, dropped=True)
    (prepare,) = group.answer(3, 1, dropped=False)
    assert (prepare.membership_epoch, prepare.members) == (2, (0, 2, 3))


def test_cancel_that_comes_too_late_changes_nothing() -> None:
    group = GroupDriver()
    group.release(1)
    group.drained(1)
    assert group.wait(60) == [c.Cancel(membership_epoch=1, targets=(0, 1, 2, 3))]
    for ep_rank in range(4):
        group.answer(ep_rank, 1, dropped=False)
    assert group.membership.change.phase is Phase.agreed
    assert group.all_switched(0, 1, 2, 3, epoch=1) == [
        c.SetRouting(ep_ranks=(0, 2, 3), members=(0, 2, 3)),
        finished("op1", 1),
    ]


def test_switch_report_under_a_cancel_settles_that_it_was_agreed() -> None:
    group = GroupDriver()
    group.release(1)
    group.drained(1)
    group.wait(60)
    group.answer(0, 1, dropped=False)
    group.switched(0, 1)
    assert group.answer(1, 1, dropped=False) == []
    assert group.membership.outcome is Outcome.ignored
    with pytest.raises(InvalidTransition):
        group.answer(2, 1, dropped=True)
    assert finished("op1", 1) in group.all_switched(1, 2, 3, epoch=1)


def test_joiners_hear_of_a_cancel_when_the_old_members_have_dropped_the_plan() -> None:
    group = GroupDriver(3)
    group.park(1, 2)
    group.rejoin()
    assert group.wait(60) == [c.Cancel(membership_epoch=2, targets=(0,))]
    assert group.answer(0, 2, dropped=True) == [c.Cancel(membership_epoch=2, targets=(1, 2))]
    assert group.answer(1, 2, dropped=True) == []
    (prepare,) = group.answer(2, 2, dropped=True)
    assert (prepare.membership_epoch, prepare.members) == (3, (0, 1, 2))


def test_release_that_never_comes_to_an_agreement_is_given_up() -> None:
    group = GroupDriver(2)
    group.release(1)
    commands = group.drained(1)
    for epoch in (1, 2, 3):
        assert len(only(commands, c.Prepare)) == 1
        group.wait(60)
        group.answer(0, epoch, dropped=True)
        commands = group.answer(1, epoch, dropped=True)
    assert commands == [
        c.StopDrain(ep_rank=1),
        c.SetRouting(ep_ranks=(0, 1), members=(0, 1)),
        finished("op1", 0, "3 changes in a row did not come to an agreement"),
    ]


def test_rejoin_that_never_comes_to_an_agreement_fails_the_group() -> None:
    group = GroupDriver(2)
    group.park(1)
    group.rejoin()
    for epoch in (2, 3, 4):
        group.wait(60)
        group.answer(0, epoch, dropped=True)
        commands = group.answer(1, epoch, dropped=True)
    assert commands[0] == finished("op2", 1, "3 changes in a row did not come to an agreement")
    assert isinstance(commands[1], c.Fail)


@pytest.mark.parametrize(
    ("is_switching", "wait_s", "text"),
    [(False, 30, "cancelling, waits for {0,1}"), (True, 40, "agreed, waits for {0}")],
)
def test_silence_after_a_cancel_or_an_agreement_fails_a_group_that_does_not_recover(
    is_switching, wait_s, text
) -> None:
    group = GroupDriver(2, recovers=False)
    group.release(1)
    group.drained(1)
    if is_switching:
        group.switched(1, 1)
    else:
        group.wait(60)
    assert group.wait(wait_s - 1) == []
    done, fail = group.wait(1)
    assert not done.ok
    assert fail.reason.startswith(
        "a deadline has passed: change membership_epoch=1 members {0,1} -> {0} " + text
    )
    assert "ep_rank=1 ReleaseRequested: serving -> draining" in fail.reason


def test_lost_rank_fails_a_group_that_does_not_recover_and_everything_is_answered() -> None:
    group = GroupDriver(recovers=False)
    group.release(1)
    group.drained(1)
    group.fence("control")
    done, refused, fail = group.lost(2, "silent for 60 s")
    assert done == finished("op1", 0, "ep_rank 2 is lost: silent for 60 s")
    assert refused == c.RefuseFence(fence_id="control", reason="ep_rank 2 is lost: silent for 60 s")
    assert fail.reason.startswith("ep_rank 2 is lost: silent for 60 s; in flight: change membership_epoch=1 ")
    assert fail.reason.endswith("failed: ep_rank 2 is lost: silent for 60 s")
    (after,) = group.release(3)
    assert after.reason.startswith("the group has failed: ep_rank 2 is lost")
    assert isinstance(group.fence("more")[0], c.RefuseFence)
    assert group.switched(0, 1) == []


def test_fence_waits_for_the_change_and_holds_the_next_one() -> None:
    group = GroupDriver()
    group.release(1, 2)
    group.drained(1)
    assert group.fence("control") == []
    group.drained(2)
    commands = group.all_switched(0, 1, 2, 3, epoch=1)
    assert commands == [c.SetRouting(ep_ranks=(0, 3), members=(0, 2, 3)), c.GrantFence(fence_id="control")]
    assert group.fence("control") == [c.GrantFence(fence_id="control")]
    assert group.work(1) == []
    (prepare,) = group.unfence("control")
    assert prepare.members == (0, 1, 2, 3)
    assert group.unfence("control") == []
    assert group.membership.outcome is Outcome.ignored


def test_full_fence_expands_first() -> None:
    group = GroupDriver()
    group.park(1, 3)
    group.release(2)
    (prepare,) = group.fence("update", full=True)
    assert prepare.members == (0, 1, 2, 3)
    group.drained(2)
    commands = group.all_switched(0, 1, 2, 3, epoch=2)
    assert commands == [
        c.SetRouting(ep_ranks=(0, 1, 3), members=(0, 1, 2, 3)),
        c.GrantFence(fence_id="update"),
    ]
    (prepare,) = group.unfence("update")
    assert prepare.members == (0, 1, 3)


def test_weights_that_a_parked_rank_missed_are_never_served() -> None:
    group = GroupDriver()
    group.park(1)
    group.fence("control")
    assert group.rejoin(1) == []
    stale = "ep_rank 1 holds weight_version 0, the members hold 5"
    assert group.updated(5) == [finished("op2", 1, stale)]
    assert group.unfence("control") == []
    assert group.rejoin() == [finished("op3", 1, stale)]
    assert group.fence("update", full=True) == [c.RefuseFence(fence_id="update", reason=stale)]
    assert group.work(1) == []
    assert (group.membership.outcome, states(group)) == (Outcome.refused, "spss")


def test_update_under_an_expansion_fails_the_group() -> None:
    group = GroupDriver(2)
    group.park(1)
    group.rejoin()
    group.updated(5)
    *_, fail = group.all_switched(0, 1, epoch=2)
    assert fail.reason.startswith("the members of epoch 2 hold the weights {")


def test_switch_to_a_dead_epoch_is_invalid_even_later() -> None:
    group = GroupDriver(2)
    group.release(1)
    group.drained(1)
    group.ask_cancel(1, 1)
    group.answer(0, 1, dropped=True)
    with pytest.raises(InvalidTransition):
        group.switched(1, 1)
    group.answer(1, 1, dropped=True)
    group.drained(1)
    group.all_switched(0, 1, epoch=2)
    with pytest.raises(InvalidTransition):
        group.switched(0, 1)
