"""The decisions of Membership, one situation each."""

import msgspec
import pytest
from group_driver import GroupDriver, finished, states

from flexfloor.experts.placement import canonical, rehome
from flexfloor.membership import commands as c
from flexfloor.membership import events as e
from flexfloor.membership.ranks import MOVES
from flexfloor.membership.state import InvalidTransition, Membership, MembershipStatus, Outcome, RankState


def test_group_takes_requests_when_the_last_rank_has_joined() -> None:
    group = GroupDriver(2, joined=False)
    assert group.join(1) == []
    assert group.release(0) == [finished("op1", 0, "ep_ranks [0] have not joined yet")]
    assert group.join(0) == [c.SetRouting(ep_ranks=(0, 1), members=(0, 1))]
    assert group.membership.is_ready


def test_ranks_that_loaded_other_weights_fail_the_group() -> None:
    group = GroupDriver(2, joined=False)
    group.join(0, weight_version=3)
    (fail,) = group.join(1, weight_version=4)
    assert isinstance(fail, c.Fail)
    assert "ep_rank 1 joined with weight_version 4, the others with 3" in fail.reason


def test_release_drains_first_and_then_leaves_the_group() -> None:
    group = GroupDriver()
    assert group.release(1, 3) == [
        c.SetRouting(ep_ranks=(0, 2), members=(0, 1, 2, 3)),
        c.StartDrain(ep_rank=1),
        c.StartDrain(ep_rank=3),
    ]
    full = canonical(8, 4)
    assert group.drained(3) == [
        c.Prepare(
            membership_epoch=1, old_members=(0, 1, 2, 3), members=(0, 1, 2), leavers_exit=(),
            old_placement=full, new_placement=rehome(full, (0, 1, 2)), targets=(0, 1, 2, 3),
        )
    ]  # fmt: skip
    assert group.all_switched(3, 0, 2, epoch=1) == []
    assert (group.membership.membership_epoch, states(group)) == (0, "sdsd")
    # Rank 1 drains and is a member still: control calls may have to enter there.
    assert group.switched(1, 1) == [c.SetRouting(ep_ranks=(0, 2), members=(0, 1, 2))]
    assert (group.membership.membership_epoch, states(group)) == (1, "sdsp")
    (prepare,) = group.drained(1)
    assert prepare.members == (0, 2)
    assert group.all_switched(0, 1, 2, epoch=2) == [
        c.SetRouting(ep_ranks=(0, 2), members=(0, 2)),
        finished("op1", 2),
    ]
    assert (group.membership.members, states(group)) == ((0, 2), "spsp")


def test_ranks_that_drained_under_a_change_leave_in_the_next_one() -> None:
    group = GroupDriver()
    group.release(1, 2, 3)
    group.drained(1)
    group.drained(2)
    group.drained(3)
    *_, prepare = group.all_switched(0, 1, 2, 3, epoch=1)
    assert (prepare.old_members, prepare.members) == ((0, 2, 3), (0,))


def test_exit_leaves_for_good() -> None:
    group = GroupDriver()
    group.release(2, leave=e.Leave.exit)
    (prepare,) = group.drained(2)
    assert prepare.leavers_exit == (2,)
    assert group.switched(2, 1) == []
    assert group.lost(2, "its socket closed") == []
    assert group.membership.outcome is Outcome.ignored
    assert group.all_switched(0, 1, 3, epoch=1) == [
        c.AbandonRank(ep_rank=2),
        c.SetRouting(ep_ranks=(0, 1, 3), members=(0, 1, 3)),
        finished("op1", 1),
    ]
    assert states(group) == "ssxs"
    assert group.lost(2) == []
    assert group.rejoin(2) == [finished("op2", 1, "ep_rank 2 is exited: its process is gone")]
    assert group.release(2) == [finished("op3", 1)]
    assert group.rejoin() == [finished("op4", 1)]


@pytest.mark.parametrize(
    ("ep_ranks", "leave", "reason"),
    [
        ((4,), e.Leave.park, "ep_rank 4 does not exist: the ranks are 0 to 3"),
        ((), e.Leave.park, "no ep_rank is named"),
        (
            (0, 2),
            e.Leave.park,
            "releasing ep_ranks [0, 2] would leave 1 of the 3 ranks that take requests, and the floor is 2",
        ),
        (
            (1,),
            e.Leave.exit,
            "ep_rank 1 is parked: it can exit from the group only, so let it rejoin first",
        ),
    ],
)
def test_release_is_refused_with_the_reason(ep_ranks, leave, reason) -> None:
    group = GroupDriver(floor=2)
    group.park(1)
    assert group.release(*ep_ranks, leave=leave) == [finished("op2", 1, reason)]
    assert (group.membership.outcome, states(group)) == (Outcome.refused, "spss")


def test_floor_counts_releases_that_still_drain() -> None:
    group = GroupDriver(floor=2)
    group.release(0, 1)
    (refused,) = group.release(2)
    assert "would leave 1 of the 2 ranks that take requests, and the floor is 2" in refused.reason


def test_draining_rank_keeps_its_way_of_leaving() -> None:
    group = GroupDriver()
    group.release(1)
    (refused,) = group.release(1, leave=e.Leave.exit)
    assert refused.reason == "ep_rank 1 is draining in order to park, not to exit"
    assert group.release(1) == []
    group.drained(1)
    done = group.all_switched(0, 1, 2, 3, epoch=1)
    assert done == [
        c.SetRouting(ep_ranks=(0, 2, 3), members=(0, 2, 3)),
        finished("op1", 1),
        finished("op3", 1),
    ]


def test_repeated_operation_is_answered_alike_and_done_once() -> None:
    group = GroupDriver()
    group.release(1, operation_id="same")
    assert group.release(1, operation_id="same") == []
    group.drained(1)
    group.all_switched(0, 1, 2, 3, epoch=1)
    group.rejoin()
    group.all_switched(0, 1, 2, 3, epoch=2)
    assert group.release(1, operation_id="same") == [finished("same", 1)]
    assert states(group) == "ssss"


def test_rejoin_brings_all_parked_ranks_back_in_one_change() -> None:
    group = GroupDriver()
    group.park(1, 2, 3)
    (prepare,) = group.rejoin()
    assert (prepare.old_members, prepare.members, prepare.targets) == ((0,), (0, 1, 2, 3), (0, 1, 2, 3))
    assert prepare.new_placement == canonical(8, 4)
    assert group.all_switched(0, 1, 2, 3, epoch=2) == [
        c.SetRouting(ep_ranks=(0, 1, 2, 3), members=(0, 1, 2, 3)),
        finished("op2", 2),
    ]


def test_rejoin_of_a_draining_rank_stops_its_drain() -> None:
    group = GroupDriver()
    group.release(1)
    assert group.rejoin(1) == [
        c.StopDrain(ep_rank=1),
        c.SetRouting(ep_ranks=(0, 1, 2, 3), members=(0, 1, 2, 3)),
        finished("op1", 0, "ep_rank 1 rejoined"),
        finished("op2", 0),
    ]
    assert group.drained(1) == []
    assert (group.membership.outcome, states(group)) == (Outcome.ignored, "ssss")


def test_rejoin_of_a_leaver_waits_for_the_change_in_flight() -> None:
    group = GroupDriver()
    group.release(1)
    group.drained(1)
    assert group.rejoin(1) == []
    _, done, prepare = group.all_switched(0, 1, 2, 3, epoch=1)
    assert done == finished("op1", 1)
    assert prepare.members == (0, 1, 2, 3)
    assert group.release(1) == [finished("op3", 1, "ep_rank 1 is about to rejoin")]
    assert finished("op2", 2) in group.all_switched(0, 1, 2, 3, epoch=2)


def test_rejoin_of_a_leaver_that_exits_is_answered_when_it_is_gone() -> None:
    group = GroupDriver()
    group.release(1, leave=e.Leave.exit)
    group.drained(1)
    group.rejoin(1)
    done = group.all_switched(0, 1, 2, 3, epoch=1)
    assert done == [
        c.AbandonRank(ep_rank=1),
        finished("op2", 1, "ep_rank 1 has exited"),
        c.SetRouting(ep_ranks=(0, 2, 3), members=(0, 2, 3)),
        finished("op1", 1),
    ]


def test_work_at_a_parked_rank_wakes_it() -> None:
    group = GroupDriver()
    group.park(1, 3)
    (prepare,) = group.work(3)
    assert prepare.members == (0, 2, 3)
    group.all_switched(0, 2, 3, epoch=2)
    assert states(group) == "spss"


def test_wake_during_a_change_is_not_lost_and_comes_before_a_release() -> None:
    group = GroupDriver()
    group.park(3)
    group.release(1, 2)
    group.drained(1)
    assert group.work(3) == []
    group.drained(2)
    *_, prepare = group.all_switched(0, 1, 2, epoch=2)
    assert prepare.members == (0, 2, 3)
    *_, prepare = group.all_switched(0, 2, 3, epoch=3)
    assert prepare.members == (0, 3)


def test_work_that_reaches_a_leaver_after_its_switch_wakes_it_when_the_others_have_switched() -> None:
    group = GroupDriver()
    group.release(1)
    group.drained(1)
    group.switched(1, 1)
    assert group.work(1) == []
    *_, prepare = group.all_switched(0, 2, 3, epoch=1)
    assert prepare.members == (0, 1, 2, 3)


def test_stale_lives_and_epochs_are_ignored() -> None:
    group = GroupDriver()
    group.feed(e.DrainFinished(ep_rank=1, incarnation=5, at=group.tick()))
    assert group.membership.outcome_reason == "stale incarnation 5 of ep_rank 1"
    group.park(1)
    group.ask_cancel(0, 1)
    assert group.membership.outcome_reason == "stale membership_epoch 1"
    group.feed(e.RankJoined(ep_rank=1, incarnation=5, weight_version=0, at=group.tick()))
    assert group.membership.outcome_reason == (
        "ep_rank 1 is parked in incarnation 101, and a second process (5) cannot take its place"
    )
    group.join(1)
    assert group.membership.outcome_reason == "ep_rank 1 has joined before"
    assert states(group) == "spss"


def test_invalid_transition_tells_the_story() -> None:
    group = GroupDriver()
    group.park(1)
    with pytest.raises(InvalidTransition) as raised:
        group.drained(1)
    first, *story = str(raised.value).splitlines()
    assert first.startswith("ep_rank 1 is parked, which does not accept DrainFinished(at=")
    assert first.endswith("(no change in flight). Its last transitions:")
    assert story[0] == "t=2.000 membership_epoch=0 ep_rank=1 RankJoined: starting -> serving"
    assert story[-1] == "t=12.000 membership_epoch=1 ep_rank=1 left: draining -> parked"


@pytest.mark.parametrize(
    "say",
    [
        lambda group: group.switched(0, 9),
        lambda group: group.switched(3, 2),
        lambda group: group.answer(0, 2, dropped=True),
        lambda group: group.ask_cancel(3, 2),
        lambda group: group.feed(e.WorkArrived(ep_rank=9, incarnation=0, at=0.0)),
    ],
    ids=["no such epoch", "no target", "no cancel", "no target asks", "no such rank"],
)
def test_what_a_rank_cannot_say(say) -> None:
    group = GroupDriver()
    group.park(3)
    group.release(2)
    group.drained(2)
    with pytest.raises(InvalidTransition):
        say(group)
    group.membership.validate()


def test_every_state_can_be_left_but_the_ends_of_a_life() -> None:
    assert {state for state in RankState if not MOVES[state]} == {RankState.exited, RankState.lost}
    assert set(MOVES) == set(RankState)
    assert set.union(*map(set, MOVES.values())) == set(RankState) - {RankState.starting}


@pytest.mark.parametrize("floor", [0, 5])
def test_floor_must_be_possible(floor) -> None:
    with pytest.raises(ValueError, match=f"floor={floor}: it must be between 1 and ep_size=4"):
        Membership(4, floor, 8)


def test_status_tells_all_and_is_json() -> None:
    group = GroupDriver()
    group.release(1)
    group.drained(1)
    for ep_rank in range(4):
        group.switched(ep_rank, 1, stall_s=0.5 if ep_rank == 1 else 0.01 * ep_rank, num_bytes=10)
    group.rejoin()
    status = group.membership.status()
    assert status.experts_per_rank == {0: 3, 2: 3, 3: 2}
    assert status.states == {0: "serving", 1: "parked", 2: "serving", 3: "serving"}
    assert (
        status.change
        == "change membership_epoch=2 members {0,2,3} -> {0,1,2,3} preparing, waits for {0,1,2,3}"
    )
    (switch,) = status.last_switches
    assert (switch.members, switch.stall_s, switch.num_bytes) == ((0, 2, 3), 0.03, 40)
    assert msgspec.json.decode(msgspec.json.encode(status), type=MembershipStatus) == status
