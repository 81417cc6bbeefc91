"""The state of the group and the steps of a change; `Membership` says which event takes which step. PURE."""

import logging
from abc import ABC, abstractmethod
from collections import deque
from enum import StrEnum

from flexfloor.errors import FlexfloorError
from flexfloor.experts.placement import ExpertPlacement, canonical, rehome
from flexfloor.membership import commands as c
from flexfloor.membership import events as e
from flexfloor.membership.change import Change, Phase, braced
from flexfloor.membership.events import Leave, WeightVersion
from flexfloor.membership.fences import Fences
from flexfloor.membership.operations import OperationBook
from flexfloor.membership.ranks import MOVES, Rank, RankState
from flexfloor.membership.recovery import Recovery
from flexfloor.membership.status import MembershipStatus, RecoveryRecord, SwitchRecord

logger = logging.getLogger(__name__)

STORY_LINES = 20
MAX_FAILED_ATTEMPTS = 3
"""Changes in a row that died without a leaver having got work, before their cause is given up."""


class InvalidTransition(FlexfloorError):
    """A rank said what it cannot say now: one of our processes is wrong. The text ends with the story."""


class Outcome(StrEnum):
    """Of an event that raised nothing."""

    applied = "applied"
    refused = "refused"
    ignored = "ignored"


class Group(ABC):
    """`ep_size` launch ranks. All of them are members at the start: epoch 0, canonical placement.

    Args:
        floor: fewest ranks that may serve.
        prepare_timeout_s: how long a plan may be out before it is cancelled.
        cancel_timeout_s: how long the answers to a cancel may take; then a recovery starts, or the group has
            failed where there is none.
        switch_timeout_s: the same, from agreement (as far as known here) to the last report.
        recovers: whether survivors go on after a loss. False: the group fails with the first one.
        loss_wait_s: how long a rank may be broken before the others are broken with nobody known lost.
        recover_timeout_s: how long each phase of a recovery may take before the ranks that it waits for are
            fenced; a second time, the group has failed.
    """

    def __init__(
        self,
        ep_size: int,
        floor: int,
        num_experts: int,
        prepare_timeout_s: float = 60.0,
        *,
        cancel_timeout_s: float = 30.0,
        switch_timeout_s: float = 60.0,
        recovers: bool = True,
        loss_wait_s: float = 10.0,
        recover_timeout_s: float = 120.0,
    ) -> None:
        if not 1 <= floor <= ep_size:
            raise ValueError(f"floor={floor}: it must be between 1 and ep_size={ep_size}")
        self.ep_size = ep_size
        self.floor = floor
        self.num_experts = num_experts
        self.prepare_timeout_s = prepare_timeout_s
        self.cancel_timeout_s = cancel_timeout_s
        self.switch_timeout_s = switch_timeout_s
        self.recovers = recovers
        self.loss_wait_s = loss_wait_s
        self.recover_timeout_s = recover_timeout_s
        self.ranks = tuple(Rank(ep_rank=ep_rank) for ep_rank in range(ep_size))
        self.membership_epoch = 0
        self.last_epoch = 0
        """Highest number given to a change; never given again."""
        self.dead_epochs: set[int] = set()
        self.members: tuple[int, ...] = tuple(range(ep_size))
        self.placement: ExpertPlacement = canonical(num_experts, ep_size)
        self.weight_version: WeightVersion | None = None
        """Of the members."""
        self.change: Change | None = None
        self.recovery: Recovery | None = None
        self.generation = 0
        """Orders to break so far."""
        self.fences = Fences()
        self.operations = OperationBook()
        self.failed: str | None = None
        self.outcome = Outcome.applied
        """Of the last event."""
        self.outcome_reason = ""
        self._num_failed_attempts = 0
        self._num_unexplained = 0
        self._recoveries: deque[RecoveryRecord] = deque(maxlen=STORY_LINES)
        self._last_routing: c.SetRouting | None = None
        self._switches: deque[SwitchRecord] = deque(maxlen=STORY_LINES)
        self._story: deque[tuple[int | None, str]] = deque(maxlen=STORY_LINES)
        self._out: list[c.Command] = []

    # What can be asked.

    @property
    def routed(self) -> tuple[int, ...]:
        """Members that take new requests."""
        return tuple(rank for rank in self.members if self.ranks[rank].state is RankState.serving)

    @property
    def is_ready(self) -> bool:
        """Every rank has joined."""
        return self.failed is None and not self._in_state(RankState.starting)

    @property
    def next_deadline_s(self) -> float | None:
        """When a TimePassed is due, on the clock of the events."""
        under_way = self.recovery or self.change
        return None if under_way is None else under_way.deadline_s

    def story(self, ep_rank: int | None = None) -> str:
        """The last transitions, oldest first: of one rank and the group, or of all."""
        lines = [text for rank, text in self._story if ep_rank is None or rank in (None, ep_rank)]
        return "\n".join(lines) or "nothing has happened yet"

    def status(self) -> MembershipStatus:
        return MembershipStatus(
            membership_epoch=self.membership_epoch,
            members=self.members,
            routed=self.routed,
            states={rank.ep_rank: str(rank.state) for rank in self.ranks},
            weight_versions={rank.ep_rank: rank.weight_version for rank in self.ranks},
            floor=self.floor,
            experts_per_rank={
                rank: sum(expert is not None for expert in slots) for rank, slots in self.placement.slots
            },
            last_switches=tuple(self._switches),
            change=None if self.change is None else str(self.change),
            num_fences=self.fences.num_all,
            failed=self.failed,
            lost=self._in_state(RankState.lost),
            recoveries=tuple(self._recoveries),
            recovering=None if self.recovery is None else str(self.recovery),
        )

    # After every event.

    def _settle(self, at: float) -> None:
        if self.recovery is not None:
            return self._check_recovery(self.recovery, at)
        self._check_deadline(at)
        if self.failed is not None or self.recovery is not None:
            return
        leavers = self.change.leavers if self.change is not None else ()
        for ep_rank in self._in_state(RankState.draining):
            if self.ranks[ep_rank].is_wanted and ep_rank not in leavers:
                self._stop_drain(self.ranks[ep_rank], at, f"ep_rank {ep_rank} rejoined")
        if self.change is not None:
            return
        granted = self.fences.grant(is_full=not self._in_state(RankState.parked))
        self._out += [c.GrantFence(fence_id=name) for name in granted]
        self._start_next_change(at)

    @abstractmethod
    def _check_recovery(self, recovery: Recovery, at: float) -> None:
        """By the clock."""

    def _check_deadline(self, at: float) -> None:
        change = self.change
        if change is None or at < change.deadline_s:
            return
        if change.phase is Phase.preparing:
            self._cancel(change, at)
        else:
            self._give_up_waiting(change, at)

    @abstractmethod
    def _give_up_waiting(self, change: Change, at: float) -> None:
        """The change is past a deadline at which it cannot be cancelled any more."""

    def _start_next_change(self, at: float) -> None:
        if self.fences.held or not self.is_ready:
            return
        parked = [self.ranks[ep_rank] for ep_rank in self._in_state(RankState.parked)]
        is_full = self.fences.is_full_wanted
        joiners = {rank.ep_rank for rank in parked if is_full or rank.is_wanted or rank.is_woken}
        draining = [self.ranks[ep_rank] for ep_rank in self._in_state(RankState.draining)]
        leavers = {rank.ep_rank for rank in draining if rank.is_drained}
        if joiners:
            self._prepare(tuple(sorted({*self.members, *joiners})), at)
        elif leavers:
            self._prepare(tuple(rank for rank in self.members if rank not in leavers), at)

    # A change, step by step.

    def _prepare(self, members: tuple[int, ...], at: float) -> None:
        self.last_epoch += 1
        leavers = [self.ranks[rank] for rank in self.members if rank not in members]
        change = Change(
            membership_epoch=self.last_epoch,
            old_members=self.members,
            members=members,
            leavers_exit=tuple(rank.ep_rank for rank in leavers if rank.leave is Leave.exit),
            placement=rehome(self.placement, members),
            deadline_s=at + self.prepare_timeout_s,
        )
        self.change = change
        self._tell(at, None, str(change))
        self._out.append(
            c.Prepare(
                membership_epoch=change.membership_epoch,
                old_members=change.old_members,
                members=members,
                leavers_exit=change.leavers_exit,
                old_placement=self.placement,
                new_placement=change.placement,
                targets=change.targets,
            )
        )

    def _enter(self, change: Change, phase: Phase, at: float, timeout_s: float) -> None:
        change.phase = phase
        change.deadline_s = at + timeout_s
        self._tell(at, None, str(change))

    def _cancel(self, change: Change, at: float) -> None:
        self._enter(change, Phase.cancelling, at, self.cancel_timeout_s)
        self._order_cancel(change)

    def _withdraw(self, change: Change, at: float) -> None:
        self._enter(change, Phase.withdrawing, at, self.cancel_timeout_s)
        self._order_cancel(change)

    def _order_cancel(self, change: Change) -> None:
        self._out.append(c.Cancel(membership_epoch=change.membership_epoch, targets=change.cancel_targets))

    def _bury(self, change: Change, at: float) -> None:
        """The change is dead; its leavers stay in the group, and the next change may be another one."""
        self.change = None
        self.dead_epochs.add(change.membership_epoch)
        self._tell(at, None, f"change membership_epoch={change.membership_epoch} is dead")
        for ep_rank in change.leavers:
            self.ranks[ep_rank].is_woken = False
        self._num_failed_attempts = 0 if change.is_asked else self._num_failed_attempts + 1
        if self._num_failed_attempts < MAX_FAILED_ATTEMPTS:
            return
        reason = f"{self._num_failed_attempts} changes in a row did not come to an agreement"
        if change.joiners:
            return self._fail(at, reason)
        self._num_failed_attempts = 0
        for ep_rank in change.leavers:
            self._stop_drain(self.ranks[ep_rank], at, reason)

    def _finish_change(self, change: Change, at: float) -> None:
        self.change = None
        self._num_failed_attempts = self._num_unexplained = 0
        self.membership_epoch, self.members = change.membership_epoch, change.members
        self.placement = change.placement
        self._record_switch(change, at)
        for ep_rank in change.leavers:
            self._let_go(self.ranks[ep_rank], ep_rank in change.leavers_exit, at)
        for ep_rank in change.joiners:
            rank = self.ranks[ep_rank]
            rank.is_wanted = rank.is_woken = False
            self._move(rank, RankState.serving, at, "joined")
        versions = {self.ranks[ep_rank].weight_version for ep_rank in self.members}
        if len(versions) > 1:
            return self._fail(at, f"the members of epoch {self.membership_epoch} hold the weights {versions}")
        self._route()
        for ep_rank in change.leavers:
            self._out += self.operations.rank_is_through(ep_rank, self.membership_epoch, is_release=True)
        for ep_rank in change.joiners:
            self._out += self.operations.rank_is_through(ep_rank, self.membership_epoch, is_release=False)

    def _let_go(self, rank: Rank, does_exit: bool, at: float) -> None:
        rank.is_drained = False
        self._move(rank, RankState.exited if does_exit else RankState.parked, at, "left")
        if not does_exit:
            return
        # A request may have reached it after it was drained, and would wait there for ever.
        self._out.append(c.AbandonRank(ep_rank=rank.ep_rank))
        rank.is_wanted = rank.is_woken = False
        self._end_waits(rank.ep_rank, f"ep_rank {rank.ep_rank} has exited", is_release=False)

    def _record_switch(self, change: Change, at: float) -> None:
        stayed = [said for rank, said in change.switched.items() if rank not in change.leavers]
        record = SwitchRecord(
            membership_epoch=change.membership_epoch,
            members=change.members,
            stall_s=max(said.stall_s for said in stayed),
            num_bytes=sum(said.num_bytes for said in change.switched.values()),
            at=at,
        )
        self._switches.append(record)
        figures = f"stall_s={record.stall_s:.4f} num_bytes={record.num_bytes}"
        self._tell(at, None, f"is in force with members {braced(change.members)} {figures}")

    def _stop_drain(self, rank: Rank, at: float, reason: str) -> None:
        rank.is_drained = rank.is_wanted = False
        self._move(rank, RankState.serving, at, "stop drain")
        self._out.append(c.StopDrain(ep_rank=rank.ep_rank))
        self._route()
        self._end_waits(rank.ep_rank, reason, is_release=True)
        self._out += self.operations.rank_is_through(rank.ep_rank, self.membership_epoch, is_release=False)

    def _end_waits(self, ep_rank: int, reason: str, *, is_release: bool) -> None:
        self._out += self.operations.rank_is_off(
            ep_rank, self.membership_epoch, reason, is_release=is_release
        )

    def _route(self) -> None:
        routed = self.routed
        if self.recovery is not None and not routed:
            return  # whoever takes requests next is not known yet
        assert routed, "the floor keeps a rank that takes requests"
        routing = c.SetRouting(ep_ranks=routed, members=self.members)
        if routing != self._last_routing:
            self._last_routing = routing
            self._out.append(routing)

    # The end, and what is said about it.

    def _fail(self, at: float, reason: str) -> None:
        under_way = self.recovery or self.change
        self.failed = reason if under_way is None else f"{reason}; in flight: {under_way}"
        self._tell(at, None, f"failed: {reason}")
        self.change = self.recovery = None
        self._out += self.operations.finish_all(self.membership_epoch, reason)
        refused = self.fences.refuse(full_only=False)
        self._out += [c.RefuseFence(fence_id=name, reason=reason) for name in refused]
        self._out.append(c.Fail(reason=f"{self.failed}. The last transitions:\n{self.story()}"))

    def _move(self, rank: Rank, state: RankState, at: float, why: str) -> None:
        assert state in MOVES[rank.state], f"ep_rank {rank.ep_rank}: {rank.state} -> {state}"
        self._tell(at, rank.ep_rank, f"ep_rank={rank.ep_rank} {why}: {rank.state} -> {state}")
        rank.state = state

    def _tell(self, at: float, ep_rank: int | None, text: str) -> None:
        self._story.append((ep_rank, f"t={at:.3f} membership_epoch={self.membership_epoch} {text}"))
        logger.info("membership_epoch=%d %s", self.membership_epoch, text)

    def _ignore(self, event: e.Event, why: str) -> None:
        self.outcome, self.outcome_reason = Outcome.ignored, why
        logger.info("ignored %s: %s", name_of(event), why)

    def _refuse(self, event: e.Event, why: str) -> None:
        self.outcome, self.outcome_reason = Outcome.refused, why
        logger.warning("refused %s: %s", name_of(event), why)

    def _is_repeated(self, event: e.Event, operation_id: str) -> bool:
        if not self.operations.knows(operation_id):
            return False
        self._out += self.operations.answer(operation_id)
        self._ignore(event, f"operation {operation_id} is known")
        return True

    def _refuse_operation(self, event: e.Event, operation_id: str, reason: str) -> None:
        self._refuse(event, reason)
        self._out.append(self.operations.finish(operation_id, self.membership_epoch, reason))

    def _invalid(self, rank: Rank, event: e.Event) -> InvalidTransition:
        text = f"ep_rank {rank.ep_rank} is {rank.state}, which does not accept {event}"
        under_way = self.recovery or self.change
        text += f" (in flight: {under_way})" if under_way else " (no change in flight)"
        return InvalidTransition(f"{text}. Its last transitions:\n{self.story(rank.ep_rank)}")

    def _in_state(self, state: RankState) -> tuple[int, ...]:
        return tuple(rank.ep_rank for rank in self.ranks if rank.state is state)


def name_of(event: e.Event) -> str:
    return type(event).__name__
