"""Which control requests a rank has seen, so that a recovery loses none and gives none twice. PURE.

Every iteration opens with a broadcast of control requests by the group's first rank, then comes the gather,
then the forward pass. Where the group breaks, ranks are at most one broadcast apart:

    first rank   broadcast n+1 done (its bytes are sent) | gather
    others       broadcast n+1 done | still in the forward pass before it, or in broadcast n+1 itself

Rule 1: after a recovery every rank goes on with the gather, wherever it failed. So the recovery itself
carries what a broadcast would have brought.
Rule 2: what a rank gets that way it takes at its next broadcast, which all ranks make together: a control
request may hold collectives of its own.
Rule 3: a rank that a further loss kept from settling settles first what the others have settled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlReport:
    """One rank's part of the exchange that opens a recovered group."""

    was_member: bool
    """False: it comes from outside, and has missed nothing."""
    membership_epoch: int
    num_taken: int
    """Broadcasts since this rank switched to that epoch."""
    last: tuple[Any, ...] = ()
    """What the last of them brought."""
    pending: tuple[Any, ...] = ()
    """What this rank, the group's first, was about to broadcast."""
    settled: tuple["ControlReport", ...] = ()
    """The exchange by which it entered that epoch; empty where a switch did."""


@dataclass(slots=True)
class ControlLog:
    """This rank's broadcasts."""

    membership_epoch: int = 0
    _num_taken: int = 0
    _last: tuple[Any, ...] = ()
    _pending: tuple[Any, ...] = ()
    _due: list[Any] = field(default_factory=list)
    _settled: tuple[ControlReport, ...] = ()

    def take(self, requests: Sequence[Any]) -> list[Any]:
        """A broadcast has brought these; returns what to process."""
        self._num_taken += 1
        self._last = tuple(requests)
        due, self._due = self._due, []
        return [*due, *requests]

    def hold(self, requests: Sequence[Any]) -> None:
        """The broadcast failed, and this rank was its source."""
        self._pending = tuple(requests)

    def switch(self, membership_epoch: int) -> None:
        """All members of the new epoch are at the same loop top."""
        self.membership_epoch = membership_epoch
        self._num_taken, self._last, self._pending, self._settled = 0, (), (), ()

    def report(self, *, was_member: bool) -> ControlReport:
        return ControlReport(
            was_member=was_member,
            membership_epoch=self.membership_epoch,
            num_taken=self._num_taken,
            last=self._last,
            pending=self._pending,
            settled=self._settled,
        )

    def settle(self, reports: Sequence[ControlReport], membership_epoch: int, *, was_member: bool) -> None:
        """All members' reports, this rank's among them: the next `take` also gives what it has missed."""
        taking = [report for report in reports if report.was_member]
        if was_member:
            ahead = max(taking, key=lambda report: report.membership_epoch)
            if ahead.settled and self.membership_epoch < ahead.membership_epoch:
                self.settle(ahead.settled, ahead.membership_epoch, was_member=True)
            self._take_missed(taking)
        self.switch(membership_epoch)
        # Without what those reports carry themselves: two losses in a row are kept apart, no chain is.
        self._settled = tuple(replace(report, settled=()) for report in reports)

    def _take_missed(self, reports: Sequence[ControlReport]) -> None:
        newest = max(report.membership_epoch for report in reports)
        counts = [_count(report, newest) for report in reports]
        most = max(counts)
        if self._count_of_own(newest) < most:
            self._due += reports[counts.index(most)].last
        for report, count in zip(reports, counts, strict=True):
            # Where somebody has it already, the broadcast did go through before its source failed.
            if count == most and report.membership_epoch == newest:
                self._due += report.pending

    def _count_of_own(self, newest: int) -> int:
        return self._num_taken if self.membership_epoch == newest else 0


def _count(report: ControlReport, newest: int) -> int:
    """A rank that has not switched yet stands where the others stood when they did."""
    return report.num_taken if report.membership_epoch == newest else 0
