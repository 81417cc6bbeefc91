"""A use of released workers, as a rollout step speaks to it.

    begin > (left | recall)* > finish        in this order, once a step, by one thread at a time

Rule 1: nothing here decides who leaves. A use says how a rank leaves, and is told when it has left.
Rule 2: `begin` and `left` come between two looks at a running step, so they must not wait.
Rule 3: when `recall` with `wait` returns, nothing of the use runs on those ranks any more.
"""

from collections.abc import Mapping
from typing import Protocol

from flexfloor.membership.events import Leave


class WorkerUse(Protocol):
    """Example: Park(), CommandUse(...), SlurmUse(...)."""

    def begin(self, nodes: Mapping[int, str]) -> None:
        """The step begins, with the whole group inside. `nodes`: ep_rank -> machine, of all ranks."""
        ...

    def leave_of(self, ep_rank: int) -> Leave:
        """How this rank is to leave."""
        ...

    def left(self, ep_ranks: tuple[int, ...]) -> None:
        """They are outside the group now."""
        ...

    def recall(self, ep_ranks: tuple[int, ...], *, wait: bool) -> None:
        """They are about to go back into the group, or are back by themselves (`wait=False`)."""
        ...

    def finish(self) -> None:
        """The step is over, however it ended."""
        ...


class Park:
    """Nobody uses them: their processes wait."""

    def begin(self, nodes: Mapping[int, str]) -> None:
        pass

    def leave_of(self, ep_rank: int) -> Leave:
        return Leave.park

    def left(self, ep_ranks: tuple[int, ...]) -> None:
        pass

    def recall(self, ep_ranks: tuple[int, ...], *, wait: bool) -> None:
        pass

    def finish(self) -> None:
        pass


class Exit(Park):
    """Their processes end, and with them all that they held. They do not come back."""

    def leave_of(self, ep_rank: int) -> Leave:
        return Leave.exit
