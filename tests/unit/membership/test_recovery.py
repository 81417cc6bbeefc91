"""Losses and recoveries, one situation each."""

import pytest
from group_driver import GroupDriver, finished, only, states

from flexfloor.experts.placement import repaired
from flexfloor.membership import commands as c
from flexfloor.membership import events as e
from flexfloor.membership.state import InvalidTransition, Outcome


def kinds(commands: list[c.Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def test_survivors_of_a_loss_break_and_then_share_its_experts() -> None:
    group = GroupDriver()
    assert group.lost(2) == [
        c.AbandonRank(ep_rank=2),
        c.BreakGroup(ep_ranks=(0, 1, 3), generation=1, lost=(2,)),
        c.SetRouting(ep_ranks=(0, 1, 3), members=(0, 1, 3)),
    ]
    assert group.all_broke(3, 0, epoch=0) == []
    held = {0: (0, 1), 1: (2, 3), 3: (6, 7)}
    assert group.broke(1, epoch=0) == [
        c.Recover(
            generation=1, membership_epoch=1, members=(0, 1, 3), placement=repaired(8, 4, held, (0, 1, 3)),
            ep_ranks=(0, 1, 3), weight_version=0,
        )
    ]  # fmt: skip
    assert group.all_recovered(0, 3, epoch=1) == []
    assert group.membership.membership_epoch == 0
    assert group.recovered(1, 1) == []
    membership = group.membership
    assert (membership.membership_epoch, membership.members, states(group)) == (1, (0, 1, 3), "ssls")
    assert dict(membership.placement.slots) == {0: (0, 1, 4), 1: (2, 3, 5), 3: (6, 7)}
    status = membership.status()
    (record,) = status.recoveries
    assert (status.lost, record.lost, record.members, record.num_bytes) == ((2,), (2,), (0, 1, 3), 30)
    assert record.recovery_s == record.recovered_at - record.detected_at == 6.0
    assert group.lost(2) == []
    assert group.membership.outcome is Outcome.ignored


def test_changes_go_on_after_a_recovery() -> None:
    group = recovered_without_2()
    group.release(3)
    (prepare,) = group.drained(3)
    assert (prepare.membership_epoch, prepare.members) == (2, (0, 1))
    assert group.all_switched(0, 1, 3, epoch=2)[-1] == finished("op1", 2)
    assert group.rejoin(2) == [finished("op2", 2, "ep_rank 2 is lost: its process is gone")]
    (prepare,) = group.rejoin()
    assert prepare.members == (0, 1, 3)


def recovered_without_2() -> GroupDriver:
    group = GroupDriver()
    group.lost(2)
    group.all_broke(0, 1, 3, epoch=0)
    group.all_recovered(0, 1, 3, epoch=1)
    return group


def test_parked_rank_that_nobody_needs_is_only_marked() -> None:
    group = GroupDriver()
    group.park(3)
    assert group.lost(3) == [c.AbandonRank(ep_rank=3)]
    assert group.membership.recovery is None
    assert group.fence("full", full=True) == [c.GrantFence(fence_id="full")]


def test_parked_rank_that_dies_while_it_is_brought_back_starts_a_recovery() -> None:
    group = GroupDriver()
    group.park(3)
    group.rejoin(3)
    abandon, refused, broken = group.lost(3)
    assert (abandon.ep_rank, broken.ep_ranks) == (3, (0, 1, 2))
    assert refused == finished("op2", 1, "ep_rank 3 is lost: killed")


def test_parked_ranks_take_part_and_stay_outside() -> None:
    group = GroupDriver()
    group.park(3)
    (broken,) = only(group.lost(0), c.BreakGroup)
    assert broken.ep_ranks == (1, 2, 3)
    group.all_broke(1, 2, epoch=1)
    (recover,) = group.broke(3, epoch=1)
    assert (recover.members, recover.ep_ranks) == ((1, 2), (1, 2, 3))
    group.all_recovered(1, 2, 3, epoch=2)
    assert states(group) == "lssp"


def test_parked_ranks_join_when_the_floor_needs_them() -> None:
    group = GroupDriver(floor=2)
    group.park(1, 2)
    group.lost(0)
    group.all_broke(1, 2, epoch=1)
    (recover,) = group.broke(3, epoch=1)
    assert recover.members == (1, 3)
    commands = group.all_recovered(1, 2, 3, epoch=2)
    assert commands == [c.SetRouting(ep_ranks=(1, 3), members=(1, 3))]
    assert states(group) == "lsps"


def test_stale_parked_rank_cannot_fill_the_floor() -> None:
    group = GroupDriver(floor=2)
    group.park(1, 2)
    group.updated(5)
    group.lost(0)
    group.all_broke(1, 2, epoch=1)
    (fail,) = group.broke(3, epoch=1, version=5)
    assert "1 of 4 ranks live and hold weight_version 5, and the floor is 2" in fail.reason


def test_below_the_floor_there_is_one_clear_error() -> None:
    group = GroupDriver(2, floor=2)
    *_, fail = group.lost(1)
    assert "ep_rank 1 is lost: killed; 1 of 2 ranks are left, and the floor is 2" in fail.reason
    assert group.lost(0) == []


def test_second_loss_while_breaking_asks_everybody_anew() -> None:
    group = GroupDriver()
    group.lost(2)
    group.all_broke(0, 1, epoch=0)
    assert kinds(group.lost(3)) == ["AbandonRank", "BreakGroup", "SetRouting"]
    assert group.broke(0, epoch=0, generation=1) == []
    assert group.membership.outcome is Outcome.ignored
    (recover,) = group.all_broke(0, 1, epoch=0)
    assert (recover.generation, recover.members) == (2, (0, 1))


def test_second_loss_while_restoring_trusts_what_is_held_by_then() -> None:
    group = GroupDriver()
    group.lost(2)
    group.all_broke(0, 1, 3, epoch=0)
    group.recovered(1, 1)
    group.lost(3)
    assert group.recovered(0, 1, generation=1) == []
    # Rank 1 came through the first recovery, rank 0 did not.
    group.broke(0, epoch=0, slots=(0, 1))
    (recover,) = group.broke(1, epoch=1, slots=(2, 3, 5))
    assert (recover.membership_epoch, recover.members) == (2, (0, 1))
    assert recover.placement.experts_on(1)[2] == 5
    group.all_recovered(0, 1, epoch=2)
    (record,) = group.membership.status().recoveries
    assert (record.lost, record.generation) == ((2, 3), 2)


def test_change_in_flight_dies_and_its_leavers_serve_again() -> None:
    group = GroupDriver()
    group.release(1, 2)
    group.drained(1)
    assert only(group.lost(3), c.Prepare) == []
    *done, recover = group.all_broke(0, 1, 2, epoch=0)
    assert [command.ok for command in done] == [False]
    assert "were lost before it left; ask again" in done[0].reason
    assert recover.members == (0, 1, 2)
    group.all_recovered(0, 1, 2, epoch=2)
    assert states(group) == "sssl"
    assert group.membership.membership_epoch == 2


def test_change_that_had_come_true_stays_true_for_those_who_switched() -> None:
    group = GroupDriver()
    group.release(2, 3)
    group.drained(2)
    group.drained(3)
    # A survivor dies after the agreement. Leaver 2 is out, 3 had not got that far.
    group.fence("off")
    epoch = group.membership.change.membership_epoch
    assert group.membership.change.leavers == (2,)
    group.switched(2, epoch)
    group.lost(1)
    assert states(group) == "slpd"
    group.broke(0, epoch=epoch)
    group.broke(2, epoch=epoch, slots=())
    *done, recover = group.broke(3, epoch=0)
    assert recover.members == (0, 3)
    assert done == [finished("op1", 0, "ep_rank 3: ep_ranks [1] were lost before it left; ask again")]
    group.all_recovered(0, 2, 3, epoch=2)
    assert states(group) == "slps"


def test_joiner_that_was_in_already_stays_in() -> None:
    group = GroupDriver()
    group.park(3)
    group.rejoin(3)
    group.lost(0)
    group.all_broke(1, 2, epoch=1)
    done, recover = group.broke(3, epoch=2)
    assert done == finished("op2", 2)
    assert recover.members == (1, 2, 3)


def test_rejoin_is_tried_again_after_the_recovery() -> None:
    group = GroupDriver()
    group.park(3)
    group.rejoin(3)
    group.lost(0)
    (recover,) = group.all_broke(1, 2, 3, epoch=1)
    assert recover.members == (1, 2)
    (prepare,) = only(group.all_recovered(1, 2, 3, epoch=3), c.Prepare)
    assert prepare.members == (1, 2, 3)


def test_leaver_that_exits_is_not_waited_for() -> None:
    group = GroupDriver()
    group.release(3, leave=e.Leave.exit)
    group.drained(3)
    group.lost(2)
    group.broke(0, epoch=0)
    group.broke(1, epoch=0)
    abandon, done, recover = group.switched(3, 1)
    assert (abandon, done) == (c.AbandonRank(ep_rank=3), finished("op1", 1))
    assert recover.members == (0, 1)
    assert group.lost(3) == []
    assert states(group) == "sslx"


def test_broken_group_waits_for_the_death_to_be_seen() -> None:
    group = GroupDriver()
    assert group.broke(1, epoch=0) == []
    assert group.wait(5) == []
    assert only(group.lost(3), c.BreakGroup)[0].lost == (3,)


def test_group_that_broke_by_itself_recovers_three_times_in_a_row() -> None:
    group = GroupDriver(2)
    for epoch in range(3):
        group.broke(1, epoch=epoch)
        (broken,) = group.wait(10)
        assert (broken.ep_ranks, broken.lost) == ((0, 1), ())
        (recover,) = group.all_broke(0, 1, epoch=epoch)
        assert recover.members == (0, 1)
        group.all_recovered(0, 1, epoch=epoch + 1)
    group.broke(0, epoch=3)
    (fail,) = group.wait(10)
    assert "the group broke 4 times in a row, nobody is lost" in fail.reason


def test_rank_that_breaks_anew_while_restoring_starts_over() -> None:
    group = GroupDriver(3)
    group.lost(2)
    group.all_broke(0, 1, epoch=0)
    assert group.broke(0, epoch=0) == []
    assert group.recovered(1, 1) == []
    (broken,) = group.wait(10)
    assert broken.generation == 2


def test_loss_in_a_weight_update_fails_the_group() -> None:
    group = GroupDriver(3)
    group.fence("update", full=True)
    group.lost(2)
    group.broke(0, epoch=0, version=1)
    (fail,) = group.broke(1, epoch=0, version=0)
    assert "the loss came in a weight update: the ranks hold the weight_versions {0: 1, 1: 0}" in fail.reason
    half = GroupDriver(3)
    half.lost(2)
    half.broke(0, epoch=0, version=None)
    (fail,) = half.broke(1, epoch=0, version=None)
    assert isinstance(fail, c.Fail)


def test_update_that_had_reached_every_survivor_counts() -> None:
    group = GroupDriver(3)
    group.lost(2)
    group.broke(0, epoch=0, version="v1")
    (recover,) = group.broke(1, epoch=0, version="v1")
    assert recover.weight_version == "v1"


def test_rank_that_does_not_answer_is_fenced_and_then_lost() -> None:
    group = GroupDriver()
    group.lost(2)
    group.all_broke(0, 1, epoch=0)
    (fence,) = group.wait(100)
    assert fence.ep_rank == 3
    assert "no answer in 100 s: recovery generation=1 breaking" in fence.reason
    group.lost(3)
    (recover,) = group.all_broke(0, 1, epoch=0)
    assert kinds(group.wait(100)) == ["FenceRank", "FenceRank"]
    assert "a deadline has passed: recovery generation=2 restoring" in group.wait(100)[-1].reason
    assert recover.members == (0, 1)


def test_rank_that_cannot_restore_fails_the_group() -> None:
    group = GroupDriver()
    group.lost(2)
    group.all_broke(0, 1, 3, epoch=0)
    life = {"ep_rank": 0, "incarnation": 100, "at": group.tick()}
    (fail,) = group.feed(e.RecoveryFailed(**life, generation=1, reason="no mirror of weight_version 0"))
    assert "ep_rank 0 cannot restore: no mirror of weight_version 0" in fail.reason


def test_requests_during_a_recovery_are_answered() -> None:
    group = GroupDriver()
    group.lost(2)
    (refused,) = group.release(1)
    assert refused.reason.startswith("ask again when the recovery in flight is over: recovery generation=1")
    assert group.rejoin() == [finished("op2", 0)]
    assert group.fence("control") == []
    group.all_broke(0, 1, 3, epoch=0)
    commands = group.all_recovered(0, 1, 3, epoch=1)
    assert commands == [c.GrantFence(fence_id="control")]


@pytest.mark.parametrize(
    "say",
    [
        lambda group: group.broke(0, epoch=0, generation=2),
        lambda group: group.broke(0, epoch=7),
        lambda group: group.recovered(0, 1),
    ],
    ids=["a generation to come", "an epoch that never was", "recovered before the next group is out"],
)
def test_what_a_rank_cannot_say_raises(say) -> None:
    group = GroupDriver()
    group.lost(2)
    with pytest.raises(InvalidTransition):
        say(group)
    group.membership.validate()


def test_silence_after_a_cancel_breaks_the_group_and_only_the_hung_rank_is_fenced() -> None:
    group = GroupDriver(3)
    group.release(2)
    group.drained(2)
    assert kinds(group.wait(60)) == ["Cancel"]
    (broken,) = group.wait(30)
    assert (broken.ep_ranks, broken.lost) == ((0, 1, 2), ())
    group.all_broke(0, 2, epoch=0)
    (fence,) = group.wait(100)
    assert fence.ep_rank == 1
    group.lost(1)
    *done, recover = group.all_broke(0, 2, epoch=0)
    assert (recover.members, done[0].ok) == ((0, 2), False)
