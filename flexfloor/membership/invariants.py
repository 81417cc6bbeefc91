"""What is true of a membership between two events. PURE."""

from typing import TYPE_CHECKING

from flexfloor.membership.change import Phase
from flexfloor.membership.ranks import MEMBER_STATES, RankState
from flexfloor.membership.recovery import Recovery, Step

if TYPE_CHECKING:
    from flexfloor.membership.state import Membership


def check_membership(membership: "Membership") -> None:
    """Raises AssertionError. A group that failed keeps its state for the story and promises nothing."""
    if membership.failed is not None:
        assert membership.change is None, "a failed group has no change in flight"
        assert membership.recovery is None, "a failed group has no recovery in flight"
        assert not membership.operations.open, "a failed group leaves no operation open"
        return
    _check_members(membership)
    if membership.recovery is None:
        _check_service(membership)
    else:
        _check_recovery(membership, membership.recovery)
    _check_ranks(membership)
    _check_change(membership)
    _check_operations(membership)


def _check_members(membership: "Membership") -> None:
    members = tuple(rank.ep_rank for rank in membership.ranks if rank.state in MEMBER_STATES)
    assert membership.members == members, f"members {membership.members}, by their states {members}"
    assert membership.membership_epoch <= membership.last_epoch, "an epoch that was never given"


def _check_service(membership: "Membership") -> None:
    """Every logical expert is served, by one slot of a live member that holds the weights in force."""
    members = membership.members
    assert len(members) >= membership.floor, f"{len(members)} members under the floor {membership.floor}"
    membership.placement.validate()
    assert membership.placement.members == members, "the placement is of other members"
    if membership.is_ready:
        assert len(membership.routed) >= membership.floor, "fewer ranks take requests than the floor"
        versions = {membership.ranks[rank].weight_version for rank in members}
        assert versions == {membership.weight_version}, f"members hold the weights {versions}"


def _check_recovery(membership: "Membership", recovery: Recovery) -> None:
    assert membership.change is None, "a change runs through a recovery"
    group = recovery.next_group
    assert recovery.deadline_s, "a recovery without a deadline"
    gone = {rank.ep_rank for rank in membership.ranks if rank.state in (RankState.exited, RankState.lost)}
    if recovery.step is Step.suspected:
        return
    assert recovery.generation == membership.generation, "a recovery of an old generation"
    assert not gone & {*recovery.live}, "a recovery waits for the dead"
    assert recovery.waits_for, "a recovery waits for nobody"
    assert (group is not None) == (recovery.step is Step.restoring), "a next group at the wrong time"
    if group is not None:
        group.placement.validate()
        assert group.placement.members == group.members, "the next placement is of other members"
        assert len(group.members) >= membership.floor, "the next group is under the floor"
        assert {*membership.members} <= {*group.members} <= {*recovery.live}, "the next group is of others"
        assert group.membership_epoch > membership.membership_epoch, "the epoch falls"


def _check_ranks(membership: "Membership") -> None:
    leavers = membership.change.leavers if membership.change else ()
    for rank in membership.ranks:
        is_draining = rank.state is RankState.draining
        assert is_draining or not rank.is_drained, f"ep_rank {rank.ep_rank} is {rank.state} and drained"
        may_leave = rank.ep_rank in leavers or (is_draining and membership.recovery is not None)
        may_wait = rank.state is RankState.parked or may_leave
        assert may_wait or not rank.is_woken, f"ep_rank {rank.ep_rank} is woken in the group"
        assert may_wait or not rank.is_wanted, f"ep_rank {rank.ep_rank} is wanted in the group"
        assert (rank.incarnation is None) == (rank.state is RankState.starting), "a life without a hello"


def _check_change(membership: "Membership") -> None:
    change = membership.change
    if change is None:
        return
    assert change.membership_epoch > membership.membership_epoch, "the epoch falls"
    assert change.old_members == membership.members, "the members changed under the change"
    assert len(change.members) >= membership.floor, "the next group is under the floor"
    assert not membership.fences.held, "a change runs through a fence"
    assert change.waits_for, "a change waits for nobody"
    assert not (change.leavers and change.joiners), "ranks leave and join in one change"
    assert change.phase is Phase.agreed or not change.switched, "switched without agreement"
    states = {membership.ranks[rank].state for rank in change.leavers}
    assert states <= {RankState.draining}, f"leavers are {states}"
    states = {membership.ranks[rank].state for rank in change.joiners}
    assert states <= {RankState.parked}, f"joiners are {states}"


def _check_operations(membership: "Membership") -> None:
    for operation in membership.operations.open.values():
        assert operation.waiting, f"operation {operation.operation_id} waits for nobody"
        for rank in (membership.ranks[ep_rank] for ep_rank in operation.waiting):
            is_right = rank.state is RankState.draining if operation.is_release else rank.is_wanted
            assert is_right, f"operation {operation.operation_id} waits for ep_rank {rank.ep_rank} in vain"
