"""Decides membership. Rule 1: everything that decides it is in this file and the pure ones that it reads.
Rule 2: no sockets, no clock, no threads, no torch. Time arrives on events; work leaves as commands.
Rule 3: state changes only inside `Membership.handle`.

A release drains its ranks first and then leaves them out of the next group; a rejoin, a wake and a full fence
bring parked ranks back (ranks.py). One change of the group is in flight at a time (change.py, group.py). What
arrives meanwhile is remembered and looked at again after every event, in this order: fences, ranks to come
back, ranks to leave. A lost rank ends the change in flight and starts a recovery (recovery.py, losses.py);
nothing else begins before that is over.

An event is applied, refused with a reason, ignored and logged, or raises InvalidTransition and changes
nothing.
"""

from flexfloor.membership import commands as c
from flexfloor.membership import events as e
from flexfloor.membership.change import Change, Phase
from flexfloor.membership.group import InvalidTransition, Outcome, name_of
from flexfloor.membership.invariants import check_membership
from flexfloor.membership.losses import Losses
from flexfloor.membership.ranks import MEMBER_STATES, Rank, RankState
from flexfloor.membership.requests import rejoin_refusal, release_refusal, stale_weights
from flexfloor.membership.status import MembershipStatus

__all__ = ["InvalidTransition", "Membership", "MembershipStatus", "Outcome", "RankState"]


class Membership(Losses):
    """The group and what may happen to it. See Group for the arguments.

    Example:
        membership = Membership(4, floor=1, num_experts=32)
        commands = membership.handle(RankJoined(ep_rank=0, incarnation=17, weight_version=0, at=0.0))
    """

    def validate(self) -> None:
        """Invariants; raises AssertionError."""
        check_membership(self)

    def handle(self, event: e.Event) -> list[c.Command]:
        """Raises InvalidTransition, with nothing changed."""
        self._out = []
        self.outcome, self.outcome_reason = Outcome.applied, ""
        if self.failed is not None:
            self._handle_failed(event, self.failed)
        elif isinstance(event, e.RankEvent):
            self._handle_rank_event(event)
        else:
            self._handle_other(event)
        if self.failed is None:
            self._settle(event.at)
        return self._out

    def _handle_rank_event(self, event: e.RankEvent) -> None:
        if not 0 <= event.ep_rank < self.ep_size:
            raise InvalidTransition(
                f"{name_of(event)}: there is no ep_rank {event.ep_rank} of {self.ep_size}"
            )
        rank = self.ranks[event.ep_rank]
        if isinstance(event, e.RankJoined):
            return self._join(rank, event)
        if event.incarnation != rank.incarnation:
            return self._ignore(event, f"stale incarnation {event.incarnation} of ep_rank {rank.ep_rank}")
        match event:
            case e.DrainFinished():
                self._finish_drain(rank, event)
            case e.RankSwitched():
                self._take_switched(rank, event)
            case e.CancelAsked():
                self._take_cancel_asked(rank, event)
            case e.CancelAnswered():
                self._take_cancel_answer(rank, event)
            case e.WorkArrived():
                self._take_work(rank, event)
            case e.RankLost():
                self._lose(rank, event)
            case e.RankBroke():
                self._take_broke(rank, event)
            case e.RankRecovered():
                self._take_recovered(rank, event)
            case e.RecoveryFailed():
                self._take_recovery_failed(rank, event)
            case _:
                raise TypeError(f"unknown event {event!r}")

    def _handle_other(self, event: e.Event) -> None:
        match event:
            case e.ReleaseRequested():
                self._release(event)
            case e.RejoinRequested():
                self._rejoin(event)
            case e.WeightsUpdated():
                self._update_weights(event)
            case e.FenceRequested():
                self._fence(event)
            case e.FenceReleased():
                if not self.fences.release(event.fence_id):
                    self._ignore(event, f"unknown fence {event.fence_id}")
            case e.TimePassed():
                pass
            case _:
                raise TypeError(f"unknown event {event!r}")

    def _handle_failed(self, event: e.Event, why: str) -> None:
        reason = f"the group has failed: {why}"
        match event:
            case e.ReleaseRequested() | e.RejoinRequested():
                if not self._is_repeated(event, event.operation_id):
                    self._refuse_operation(event, event.operation_id, reason)
            case e.FenceRequested():
                self._out.append(c.RefuseFence(fence_id=event.fence_id, reason=reason))
            case e.FenceReleased():
                self.fences.release(event.fence_id)
            case _:
                self._ignore(event, reason)

    # Requests.

    def _release(self, event: e.ReleaseRequested) -> None:
        if self._is_repeated(event, event.operation_id):
            return
        if reason := release_refusal(self, event.ep_ranks, event.leave):
            return self._refuse_operation(event, event.operation_id, reason)
        inside = {rank for rank in event.ep_ranks if self.ranks[rank].state in MEMBER_STATES}
        if not inside:
            return self._out.append(self.operations.finish(event.operation_id, self.membership_epoch))
        self.operations.add(event.operation_id, is_release=True, waiting=inside)
        fresh = [rank for rank in sorted(inside) if self.ranks[rank].state is RankState.serving]
        for ep_rank in fresh:
            self.ranks[ep_rank].leave = event.leave
            self._move(self.ranks[ep_rank], RankState.draining, event.at, name_of(event))
        self._route()
        self._out += [c.StartDrain(ep_rank=ep_rank) for ep_rank in fresh]

    def _rejoin(self, event: e.RejoinRequested) -> None:
        if self._is_repeated(event, event.operation_id):
            return
        away = (*self._in_state(RankState.parked), *self._in_state(RankState.draining))
        if reason := rejoin_refusal(self, event.ep_ranks or away):
            return self._refuse_operation(event, event.operation_id, reason)
        waiting = set(event.ep_ranks or away) & set(away)
        if not waiting:
            return self._out.append(self.operations.finish(event.operation_id, self.membership_epoch))
        self.operations.add(event.operation_id, is_release=False, waiting=waiting)
        for ep_rank in waiting:
            self.ranks[ep_rank].is_wanted = True

    def _update_weights(self, event: e.WeightsUpdated) -> None:
        self.weight_version, self._num_unexplained = event.weight_version, 0
        for ep_rank in self.members:
            self.ranks[ep_rank].weight_version = event.weight_version
        self._tell(event.at, None, f"weight_version {event.weight_version} on members {self.members}")
        for ep_rank in self._in_state(RankState.parked):
            rank = self.ranks[ep_rank]
            if reason := stale_weights(self, (rank,)):
                rank.is_wanted = rank.is_woken = False
                self._end_waits(ep_rank, reason, is_release=False)
                refused = self.fences.refuse(full_only=True)
                self._out += [c.RefuseFence(fence_id=name, reason=reason) for name in refused]

    def _fence(self, event: e.FenceRequested) -> None:
        if event.fence_id in self.fences.held:
            self._out.append(c.GrantFence(fence_id=event.fence_id))
            return self._ignore(event, "repeated")
        reason = stale_weights(self, self.ranks) if event.full else ""
        if reason:
            self._refuse(event, reason)
            return self._out.append(c.RefuseFence(fence_id=event.fence_id, reason=reason))
        self.fences.waiting[event.fence_id] = event.full

    # What ranks say.

    def _join(self, rank: Rank, event: e.RankJoined) -> None:
        if rank.incarnation == event.incarnation:
            return self._ignore(event, f"ep_rank {rank.ep_rank} has joined before")
        if rank.state is not RankState.starting:
            text = f"ep_rank {rank.ep_rank} is {rank.state} in incarnation {rank.incarnation}, and a second "
            return self._refuse(event, text + f"process ({event.incarnation}) cannot take its place")
        others = {other.weight_version for other in self.ranks if other.incarnation is not None}
        rank.incarnation, rank.weight_version = event.incarnation, event.weight_version
        self.weight_version = event.weight_version
        self._move(rank, RankState.serving, event.at, name_of(event))
        if others and others != {event.weight_version}:
            text = f"ep_rank {rank.ep_rank} joined with weight_version {event.weight_version}"
            return self._fail(event.at, f"{text}, the others with {others.pop()}")
        if self.is_ready:
            self._route()

    def _finish_drain(self, rank: Rank, event: e.DrainFinished) -> None:
        if rank.state is RankState.serving or rank.is_drained:
            return self._ignore(event, f"ep_rank {rank.ep_rank} is {rank.state}")
        if rank.state is not RankState.draining:
            raise self._invalid(rank, event)
        rank.is_drained = True
        self._tell(event.at, rank.ep_rank, f"ep_rank {rank.ep_rank} is drained")

    def _take_work(self, rank: Rank, event: e.WorkArrived) -> None:
        is_leaver = self.change is not None and rank.ep_rank in self.change.leavers
        if rank.state is RankState.exited:
            return self._refuse(event, f"ep_rank {rank.ep_rank} has exited: the request there is lost")
        if reason := stale_weights(self, (rank,)):
            return self._refuse(event, f"a request waits where nothing can serve it: {reason}")
        if rank.state is RankState.parked or is_leaver:
            rank.is_woken = True
            self._tell(event.at, rank.ep_rank, f"work woke ep_rank {rank.ep_rank}")
            if is_leaver:
                self._cancel_for(rank, event.at)
        elif rank.is_drained:
            rank.is_drained = False
        else:
            self._ignore(event, f"ep_rank {rank.ep_rank} is {rank.state}")

    # The change in flight.

    def _take_switched(self, rank: Rank, event: e.RankSwitched) -> None:
        if self._take_late_switch(rank, event):
            return
        change = self._current_change(rank, event, event.membership_epoch)
        if change is None:
            return
        is_dropped = change.phase is Phase.withdrawing or any(change.answers.values())
        if is_dropped or rank.ep_rank not in change.targets or rank.ep_rank in change.switched:
            raise self._invalid(rank, event)
        change.switched[rank.ep_rank] = event
        if change.phase is not Phase.agreed:
            self._enter(change, Phase.agreed, event.at, self.switch_timeout_s)
        if not change.waits_for:
            self._finish_change(change, event.at)

    def _take_cancel_asked(self, rank: Rank, event: e.CancelAsked) -> None:
        change = self._current_change(rank, event, event.membership_epoch)
        if change is None:
            return
        if rank.ep_rank not in change.targets or rank.ep_rank in change.switched:
            raise self._invalid(rank, event)
        self._cancel_for(rank, event.at)

    def _cancel_for(self, rank: Rank, at: float) -> None:
        change = self.change
        assert change is not None, "the caller looked"
        if rank.ep_rank in change.leavers and rank.ep_rank not in change.switched:
            rank.is_drained = False
            change.is_asked = True
        if change.phase is Phase.preparing:
            self._cancel(change, at)

    def _take_cancel_answer(self, rank: Rank, event: e.CancelAnswered) -> None:
        change = self._current_change(rank, event, event.membership_epoch)
        if change is None:
            return
        if change.phase is Phase.agreed and not event.dropped:
            return self._ignore(event, "the change is agreed")
        if change.phase in (Phase.agreed, Phase.preparing) or rank.ep_rank not in change.waits_for:
            raise self._invalid(rank, event)
        change.answers[rank.ep_rank] = event.dropped
        if change.waits_for:
            return
        if not any(change.answers[voter] for voter in change.old_members):
            self._enter(change, Phase.agreed, event.at, self.switch_timeout_s)
        elif change.joiners and change.phase is Phase.cancelling:
            self._withdraw(change, event.at)
        else:
            self._bury(change, event.at)

    def _current_change(self, rank: Rank, event: e.RankEvent, membership_epoch: int) -> Change | None:
        """None: the event speaks of a change that is over, and was ignored."""
        if self.change is not None and membership_epoch == self.change.membership_epoch:
            return self.change
        is_dead_switch = isinstance(event, e.RankSwitched) and membership_epoch in self.dead_epochs
        if membership_epoch > self.last_epoch or is_dead_switch:
            raise self._invalid(rank, event)
        self._ignore(event, f"stale membership_epoch {membership_epoch}")
        return None
