"""What a loss makes of the group, step by step; see recovery.py for the picture. PURE.

A change in flight ends with the loss. Whether it came true is asked of each rank: the epoch that it speaks of
says whether it is in the group, and what it holds decides the next placement. Open releases that did not come
true are refused, since the floor may not allow them any more; rejoins are tried again afterwards.
"""

from collections.abc import Mapping

from flexfloor.experts.placement import repaired
from flexfloor.membership import commands as c
from flexfloor.membership import events as e
from flexfloor.membership.change import Change, braced
from flexfloor.membership.group import Group, name_of
from flexfloor.membership.ranks import MEMBER_STATES, Rank, RankState
from flexfloor.membership.recovery import NextGroup, Recovery, Step
from flexfloor.membership.status import RecoveryRecord

MAX_UNEXPLAINED = 3
"""Recoveries in a row with nobody lost, before their cause is given up."""


_TOO_EARLY = "not every rank had joined, so there is no group to go on with"


class Losses(Group):
    # Losses.

    def _lose(self, rank: Rank, event: e.RankLost) -> None:
        change = self.change
        is_gone = (
            change is not None and rank.ep_rank in change.switched and rank.ep_rank in change.leavers_exit
        )
        if rank.state is RankState.exited or is_gone:
            return self._ignore(event, f"ep_rank {rank.ep_rank} was to exit")
        if rank.state is RankState.lost:
            return self._ignore(event, f"ep_rank {rank.ep_rank} is lost already")
        was_parked, was_ready = rank.state is RankState.parked, self.is_ready
        self._move(rank, RankState.lost, event.at, name_of(event))
        text = f"ep_rank {rank.ep_rank} is lost: {event.reason}"
        if not self.recovers or not was_ready:
            return self._fail(event.at, text if was_ready else f"{text}; {_TOO_EARLY}")
        self._out.append(c.AbandonRank(ep_rank=rank.ep_rank))
        rank.is_drained = rank.is_wanted = rank.is_woken = False
        for is_release in (True, False):
            self._end_waits(rank.ep_rank, text, is_release=is_release)
        is_needed = self.recovery is not None or (change is not None and rank.ep_rank in change.targets)
        if was_parked and not is_needed:
            return self._tell(event.at, rank.ep_rank, f"{text}; it was parked, and nobody needs it")
        recovery = self._hold_recovery(event.at)
        recovery.detected_at = event.at
        recovery.lost = (*recovery.lost, rank.ep_rank)
        self._num_unexplained = 0
        self._break(recovery, event.at, text)

    def _take_broke(self, rank: Rank, event: e.RankBroke) -> None:
        if rank.state in (RankState.exited, RankState.lost) or event.generation < self.generation:
            return self._ignore(event, f"stale: ep_rank {rank.ep_rank} is {rank.state}")
        recovery = self.recovery or self._new_recovery(event.at)
        is_outside = rank.state is RankState.parked and event.membership_epoch <= self.membership_epoch
        is_known = is_outside or event.membership_epoch in recovery.rosters
        if event.generation > self.generation or not is_known:
            raise self._invalid(rank, event)
        if not self.recovers or not self.is_ready:
            text = f"ep_rank {rank.ep_rank} broke: {event.where}"
            return self._fail(event.at, text if self.is_ready else f"{text}; {_TOO_EARLY}")
        recovery = self._hold_recovery(event.at)
        self._tell(event.at, rank.ep_rank, f"ep_rank {rank.ep_rank} broke: {event.where}")
        if recovery.step is not Step.breaking:
            if recovery.step is not Step.suspected or not recovery.deadline_s:
                self._enter_step(recovery, Step.suspected, event.at, self.loss_wait_s)
            return
        recovery.reports[rank.ep_rank] = event
        self._restore_when_all_broke(recovery, event.at)

    def _take_recovered(self, rank: Rank, event: e.RankRecovered) -> None:
        recovery = self.recovery
        if event.generation < self.generation or (recovery is not None and recovery.step is Step.suspected):
            return self._ignore(event, f"stale generation {event.generation}")
        group = None if recovery is None else recovery.next_group
        if recovery is None or group is None or event.membership_epoch != group.membership_epoch:
            raise self._invalid(rank, event)
        if event.generation > self.generation or rank.ep_rank not in recovery.waits_for:
            raise self._invalid(rank, event)
        recovery.recovered[rank.ep_rank] = event
        if not recovery.waits_for:
            self._finish_recovery(recovery, group, event.at)

    def _take_recovery_failed(self, rank: Rank, event: e.RecoveryFailed) -> None:
        if self.recovery is None or event.generation != self.generation:
            return self._ignore(event, f"stale generation {event.generation}")
        self._fail(event.at, f"ep_rank {rank.ep_rank} cannot restore: {event.reason}")

    def _take_late_switch(self, rank: Rank, event: e.RankSwitched) -> bool:
        """A rank had switched before it could hear of the loss. False: that is not what the event says."""
        recovery = self.recovery
        change = recovery.change if recovery is not None else None
        if recovery is None or change is None or change.membership_epoch != event.membership_epoch:
            return False
        if rank.ep_rank not in change.targets or rank.ep_rank in change.switched:
            raise self._invalid(rank, event)
        change.switched[rank.ep_rank] = event
        self._place_rank(recovery, rank, event.membership_epoch, event.at)
        self._restore_when_all_broke(recovery, event.at)
        return True

    # Steps.

    def _check_recovery(self, recovery: Recovery, at: float) -> None:
        """By the clock."""
        if at < recovery.deadline_s:
            return
        if recovery.step is Step.suspected:
            self._break_unexplained(recovery, at, f"nobody was lost in {self.loss_wait_s:g} s")
        elif recovery.has_fenced:
            self._fail(at, f"a deadline has passed: {recovery}")
        else:
            recovery.has_fenced = True
            recovery.deadline_s = at + self.recover_timeout_s
            reason = f"no answer in {self.recover_timeout_s:g} s: {recovery}"
            self._out += [c.FenceRank(ep_rank=rank, reason=reason) for rank in recovery.waits_for]

    def _give_up_waiting(self, change: Change, at: float) -> None:
        """Ranks may wait for a hung one, and only it will not answer the order to break."""
        reason = f"a deadline has passed: {change}"
        if self.recovers:
            self._break_unexplained(self._hold_recovery(at), at, reason)
        else:
            self._fail(at, reason)

    def _break_unexplained(self, recovery: Recovery, at: float, why: str) -> None:
        self._num_unexplained += 1
        if self._num_unexplained > MAX_UNEXPLAINED:
            text = f"the group broke {self._num_unexplained} times in a row, nobody is lost"
            return self._fail(at, f"{text}; {why}")
        self._break(recovery, at, why)

    def _new_recovery(self, at: float) -> Recovery:
        rosters = {self.membership_epoch: self.members}
        if self.change is not None:
            rosters[self.change.membership_epoch] = self.change.members
        return Recovery(detected_at=at, rosters=rosters, change=self.change)

    def _hold_recovery(self, at: float) -> Recovery:
        """The recovery in flight, or a new one, which takes the change in flight with it."""
        if self.recovery is None:
            self.recovery = self._new_recovery(at)
            self.change, self._num_failed_attempts = None, 0
            if (change := self.recovery.change) is not None:
                self._tell(at, None, f"dies with the loss, or has come true: {change}")
                for ep_rank in change.switched:
                    self._place_rank(self.recovery, self.ranks[ep_rank], change.membership_epoch, at)
        self.members = self._with_members_by_state()
        return self.recovery

    def _break(self, recovery: Recovery, at: float, why: str) -> None:
        recovery.live = self._live()
        if len(recovery.live) < self.floor:
            text = f"{len(recovery.live)} of {self.ep_size} ranks are left, and the floor is {self.floor}"
            return self._fail(at, f"{why}; {text}")
        self.generation += 1
        recovery.generation = self.generation
        recovery.reports, recovery.recovered, recovery.next_group = {}, {}, None
        self._tell(at, None, why)
        self._enter_step(recovery, Step.breaking, at, self.recover_timeout_s)
        lost = self._in_state(RankState.lost)
        self._out.append(c.BreakGroup(ep_ranks=recovery.live, generation=self.generation, lost=lost))
        self._route()

    def _enter_step(self, recovery: Recovery, step: Step, at: float, timeout_s: float) -> None:
        recovery.step, recovery.has_fenced, recovery.deadline_s = step, False, at + timeout_s
        self._tell(at, None, str(recovery))

    def _restore_when_all_broke(self, recovery: Recovery, at: float) -> None:
        if recovery.step is not Step.breaking or recovery.waits_for:
            return
        reports = recovery.reports
        for ep_rank in recovery.live:
            self._place_rank(recovery, self.ranks[ep_rank], reports[ep_rank].membership_epoch, at)
            self.ranks[ep_rank].weight_version = reports[ep_rank].weight_version
        self._end_drains(recovery, at)
        self.members = self._with_members_by_state()
        members = self._members_to_be(at)
        if members is not None:
            self._restore(recovery, members, {rank: reports[rank].slots for rank in members}, at)

    def _members_to_be(self, at: float) -> tuple[int, ...] | None:
        """Survivors, and parked ranks up to the floor. None: the group has failed."""
        versions = {rank: self.ranks[rank].weight_version for rank in self.members}
        if len(set(versions.values())) > 1 or None in versions.values():
            self._fail(at, f"the loss came in a weight update: the ranks hold the weight_versions {versions}")
            return None
        if versions:
            self.weight_version = versions[self.members[0]]
        fit = [
            rank
            for rank in self._in_state(RankState.parked)
            if self.ranks[rank].weight_version == self.weight_version
        ]
        members = sorted([*self.members, *fit[: max(0, self.floor - len(self.members))]])
        if len(members) < self.floor:
            text = (
                f"{len(members)} of {self.ep_size} ranks live and hold weight_version {self.weight_version}"
            )
            self._fail(at, f"{text}, and the floor is {self.floor}")
            return None
        return tuple(members)

    def _restore(
        self,
        recovery: Recovery,
        members: tuple[int, ...],
        held: Mapping[int, tuple[int | None, ...]],
        at: float,
    ) -> None:
        assert self.weight_version is not None, "ranks have joined"
        self.last_epoch += 1
        group = NextGroup(
            membership_epoch=self.last_epoch,
            members=members,
            placement=repaired(self.num_experts, self.ep_size, held, members),
            targets=recovery.live,
            weight_version=self.weight_version,
        )
        recovery.next_group = group
        recovery.rosters[group.membership_epoch] = members
        self._enter_step(recovery, Step.restoring, at, self.recover_timeout_s)
        self._out.append(
            c.Recover(
                generation=recovery.generation,
                membership_epoch=group.membership_epoch,
                members=members,
                placement=group.placement,
                ep_ranks=group.targets,
                weight_version=group.weight_version,
            )
        )

    def _finish_recovery(self, recovery: Recovery, group: NextGroup, at: float) -> None:
        self.recovery = None
        self.membership_epoch, self.placement = group.membership_epoch, group.placement
        for ep_rank in group.members:
            self._place_rank(recovery, self.ranks[ep_rank], group.membership_epoch, at)
        self.members = self._with_members_by_state()
        record = RecoveryRecord(
            generation=recovery.generation,
            membership_epoch=group.membership_epoch,
            lost=recovery.lost,
            members=group.members,
            detected_at=recovery.detected_at,
            recovered_at=at,
            recovery_s=at - recovery.detected_at,
            num_bytes=sum(said.num_bytes for said in recovery.recovered.values()),
        )
        self._recoveries.append(record)
        figures = f"recovery_s={record.recovery_s:.4f} num_bytes={record.num_bytes}"
        self._tell(at, None, f"recovered with members {braced(group.members)} {figures}")
        self._route()

    # Ranks.

    def _place_rank(self, recovery: Recovery, rank: Rank, membership_epoch: int, at: float) -> None:
        """Move a rank to where the epoch that it speaks of puts it."""
        is_in = recovery.is_in_group(rank.ep_rank, membership_epoch)
        if is_in and rank.state is RankState.parked:
            rank.is_wanted = rank.is_woken = False
            self._move(rank, RankState.serving, at, "joined")
            self._out += self.operations.rank_is_through(rank.ep_rank, membership_epoch, is_release=False)
        elif not is_in and rank.state in MEMBER_STATES:
            change = recovery.change
            does_exit = change is not None and {rank.ep_rank} <= {*change.leavers_exit} & {*change.switched}
            self._let_go(rank, does_exit, at)
            recovery.live = self._live() if recovery.live else ()
            self._out += self.operations.rank_is_through(rank.ep_rank, membership_epoch, is_release=True)
        self.members = self._with_members_by_state()

    def _end_drains(self, recovery: Recovery, at: float) -> None:
        """The ranks need no order: the recovery itself ends their drains."""
        reason = f"ep_ranks {list(recovery.lost)} were lost before it left; ask again"
        for ep_rank in self._in_state(RankState.draining):
            rank = self.ranks[ep_rank]
            rank.is_drained = rank.is_wanted = rank.is_woken = False
            self._move(rank, RankState.serving, at, "stop drain")
            self._end_waits(ep_rank, f"ep_rank {ep_rank}: {reason}", is_release=True)
            self._out += self.operations.rank_is_through(ep_rank, self.membership_epoch, is_release=False)

    def _live(self) -> tuple[int, ...]:
        gone = (RankState.exited, RankState.lost)
        return tuple(rank.ep_rank for rank in self.ranks if rank.state not in gone)

    def _with_members_by_state(self) -> tuple[int, ...]:
        return tuple(rank.ep_rank for rank in self.ranks if rank.state in MEMBER_STATES)
