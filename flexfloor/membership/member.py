"""What one rank decides in a membership change and in a recovery: its votes, answers and reports. PURE.

Rule 1: a rank changes its mind at its loop top only, between two iterations. So what it votes and what it
reads in one gather cannot be undone in between.
Rule 2: a leaver votes for leaving only in a gather in which it has no tokens and no request.
Rule 3: a RecoverMsg makes void what was ordered before: the plan in hand is dropped, the drain is over.

Whoever moves the weights and runs the model (`sglang_patches.elastic.runtime`, or the simulated network)
calls it at the loop top in this order: `due_switch` > `take` each order > `settle`; in the gather `vote` and
`read_votes`; outside the group `work_arrived`, `take`, `settle_withdrawn`, `due_return`.
"""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from flexfloor.membership import messages as m
from flexfloor.membership.events import WeightVersion


class Flag(Protocol):
    def is_set(self) -> bool: ...


class PlanInHand(Protocol):
    """A PrepareMsg that this rank works on. Another thread sets `ready` or `dropped`."""

    membership_epoch: int
    members: tuple[int, ...]
    is_withdrawn: bool
    agreed: bool
    cancel_asked: bool

    @property
    def joiners(self) -> tuple[int, ...]: ...
    @property
    def ready(self) -> Flag: ...
    @property
    def dropped(self) -> Flag: ...


PlanT = TypeVar("PlanT", bound=PlanInHand)


class Member(Generic[PlanT]):
    """Args:
    send: takes a report for the manager.
    prepare: starts the work of a plan in the background.
    """

    def __init__(
        self, ep_rank: int, send: Callable[[m.ReportMsg], None], prepare: Callable[[m.PrepareMsg], PlanT]
    ) -> None:
        self.ep_rank = ep_rank
        self.epoch = 0
        """Under which this rank runs its iterations, or left the group."""
        self.plan: PlanT | None = None
        self.is_draining = False
        self.generation = 0
        """Of the last recovery that this rank came through."""
        self.breaking = 0
        """The newest generation that this rank was ordered to break for."""
        self.stands_down = False
        """The server ends. Only while this rank is parked is that its matter."""
        self._send = send
        self._prepare = prepare
        self._has_reported_drained = False

    # In the group.

    @property
    def due_switch(self) -> PlanT | None:
        """The plan that every member has agreed on."""
        return self.plan if self.plan is not None and self.plan.agreed else None

    @property
    def must_recover(self) -> bool:
        """A break was ordered that no recovery has followed: leave the loop, also if no collective failed."""
        return self.breaking > self.generation

    def take(self, order: m.OrderMsg) -> None:
        """Raises RuntimeError when the manager is gone."""
        match order:
            case m.StartDrainMsg():
                self.is_draining, self._has_reported_drained = True, False
            case m.StopDrainMsg():
                self.is_draining = False
            case m.PrepareMsg():
                self.plan = self._prepare(order)
            case m.CancelMsg():
                self._cancel(order.membership_epoch)
            case m.BreakMsg():
                self.breaking = max(self.breaking, order.generation)
            case m.RecoverMsg():
                # Of a generation that the wait for it has given up: a newer break has been ordered.
                pass
            case m.StandDownMsg():
                self.stands_down = True
            case m.ManagerLostMsg():
                raise RuntimeError(f"ep_rank={self.ep_rank}: the membership manager is gone: {order.reason}")

    def settle(self, is_drained: Callable[[], bool]) -> None:
        """After the orders of a loop top: what this rank has to say by itself."""
        self.settle_withdrawn()
        if self.is_draining:
            is_free = is_drained()
            if is_free and not self._has_reported_drained:
                self._send(m.DrainFinishedMsg())
            # Late work makes a rank busy again; it then reports anew.
            self._has_reported_drained = is_free
        plan = self.plan
        if plan is None or self.ep_rank in plan.members or plan.cancel_asked or is_drained():
            return
        plan.cancel_asked = True
        self._has_reported_drained = False
        self._send(m.CancelAskedMsg(membership_epoch=plan.membership_epoch))

    def vote(self, num_tokens: int, is_drained: Callable[[], bool]) -> int:
        """This rank's column in the gather that opens the iteration."""
        plan = self.plan
        if plan is None or not plan.ready.is_set():
            return self.epoch
        if self.ep_rank not in plan.members and (num_tokens > 0 or not is_drained()):
            return self.epoch
        return plan.membership_epoch

    def read_votes(self, votes: Sequence[int]) -> None:
        """All columns of the gather, the same on every member."""
        plan = self.plan
        if plan is not None and all(vote == plan.membership_epoch for vote in votes):
            plan.agreed = True

    def switch(self, plan: PlanT) -> bool:
        """Enter the plan's group, or leave for outside: True when this rank stays in."""
        self.plan = None
        self.epoch = plan.membership_epoch
        stays = self.ep_rank in plan.members
        if not stays:
            self.is_draining = False
        return stays

    # Cancels.

    def _cancel(self, epoch: int) -> None:
        plan = self.plan
        if plan is None or plan.membership_epoch != epoch:
            self._answer_cancel(epoch, is_dropped=epoch > self.epoch)
        elif plan.agreed or not plan.joiners:
            self._answer_cancel(epoch, is_dropped=not plan.agreed)
        else:
            # Where ranks return, all members settle together in the background.
            plan.is_withdrawn = True

    def settle_withdrawn(self) -> None:
        """Answer a cancel once it is known what came of it."""
        plan = self.plan
        if plan is None or not plan.is_withdrawn:
            return
        if plan.ready.is_set():
            plan.is_withdrawn = False
            self._answer_cancel(plan.membership_epoch, is_dropped=False)
        elif plan.dropped.is_set():
            self._answer_cancel(plan.membership_epoch, is_dropped=True)

    def _answer_cancel(self, epoch: int, *, is_dropped: bool) -> None:
        if is_dropped:
            self.plan = None
        self._send(m.CancelAnsweredMsg(membership_epoch=epoch, dropped=is_dropped))

    # Outside the group.

    def work_arrived(self) -> None:
        self._send(m.WorkArrivedMsg())

    @property
    def due_return(self) -> PlanT | None:
        """The plan that brings this rank back, when it is certain."""
        plan = self.plan
        return plan if plan is not None and self.ep_rank in plan.members and plan.ready.is_set() else None

    # After a loss.

    def broken(
        self,
        generation: int,
        *,
        slots: tuple[int | None, ...],
        weight_version: WeightVersion | None,
        where: str,
    ) -> m.BrokenMsg:
        """What this rank holds, for the manager; see RankBroke."""
        return m.BrokenMsg(
            generation=generation,
            membership_epoch=self.epoch,
            slots=slots,
            weight_version=weight_version,
            where=where,
        )

    def drop_plan(self) -> PlanT | None:
        """Rule 3. Gives the plan that will not come true, so that its staging can be given back."""
        plan, self.plan = self.plan, None
        return plan

    def recover(self, order: m.RecoverMsg) -> bool:
        """The group of a recovery is whole: enter it, or stay outside. True when this rank is in."""
        self.plan = None
        self.is_draining = self._has_reported_drained = False
        self.epoch, self.generation = order.membership_epoch, order.generation
        self.breaking = max(self.breaking, order.generation)
        return self.ep_rank in order.members
