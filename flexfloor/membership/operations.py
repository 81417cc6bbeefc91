"""Releases and rejoins that were accepted, until their last rank is through. PURE; Membership's own book."""

from collections import OrderedDict
from dataclasses import dataclass

from flexfloor.membership.commands import FinishOperation

KEPT_RESULTS = 1000
"""Answers kept for a repeated operation_id."""


@dataclass(slots=True, kw_only=True)
class Operation:
    operation_id: str
    is_release: bool
    waiting: set[int]
    """Ranks that are not through."""


class OperationBook:
    def __init__(self) -> None:
        self.open: dict[str, Operation] = {}
        self._finished: OrderedDict[str, FinishOperation] = OrderedDict()

    def knows(self, operation_id: str) -> bool:
        return operation_id in self.open or operation_id in self._finished

    def answer(self, operation_id: str) -> list[FinishOperation]:
        """The answer to a repeated request; none yet while it is open."""
        found = self._finished.get(operation_id)
        return [] if found is None else [found]

    def add(self, operation_id: str, *, is_release: bool, waiting: set[int]) -> None:
        self.open[operation_id] = Operation(operation_id=operation_id, is_release=is_release, waiting=waiting)

    def finish(self, operation_id: str, membership_epoch: int, reason: str = "") -> FinishOperation:
        """Close it, or refuse one that was never opened. No reason: it went well."""
        self.open.pop(operation_id, None)
        done = FinishOperation(
            operation_id=operation_id, ok=not reason, reason=reason, membership_epoch=membership_epoch
        )
        self._finished[operation_id] = done
        while len(self._finished) > KEPT_RESULTS:
            self._finished.popitem(last=False)
        return done

    def rank_is_through(
        self, ep_rank: int, membership_epoch: int, *, is_release: bool
    ) -> list[FinishOperation]:
        """The rank got where these operations wanted it."""
        done = []
        for operation in list(self.open.values()):
            if operation.is_release is is_release and ep_rank in operation.waiting:
                operation.waiting.discard(ep_rank)
                if not operation.waiting:
                    done.append(self.finish(operation.operation_id, membership_epoch))
        return done

    def rank_is_off(
        self, ep_rank: int, membership_epoch: int, reason: str, *, is_release: bool
    ) -> list[FinishOperation]:
        """The rank will not get where these operations wanted it."""
        ids = [
            operation.operation_id
            for operation in self.open.values()
            if operation.is_release is is_release and ep_rank in operation.waiting
        ]
        return [self.finish(name, membership_epoch, reason) for name in ids]

    def finish_all(self, membership_epoch: int, reason: str) -> list[FinishOperation]:
        return [self.finish(name, membership_epoch, reason) for name in list(self.open)]
