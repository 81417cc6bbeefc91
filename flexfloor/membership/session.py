"""Messages to one receiver, whole and in order, over a wire that may lose, repeat or mix them. PURE.

ZeroMQ does none of this while a connection lasts; when tcp breaks and comes back, what was under way is gone.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

RESEND_S = 1.0
"""Without an answer for so long, a message goes out again."""
MAX_EARLY = 1000
"""Messages kept that came before an earlier one."""


class Session:
    """One end. Each message has a number; `heard` is said to the other end with all that goes there."""

    def __init__(self) -> None:
        self.heard = 0
        """Every message up to this number was taken."""
        self._next = 1
        self._unheard: deque[list[Any]] = deque()  # [number, message, when it was last sent]
        self._early: dict[int, Any] = {}
        self.num_resent = 0
        self.num_repeated = 0

    def send(self, message: Any, at: float) -> int:
        """Its number."""
        number = self._next
        self._next += 1
        self._unheard.append([number, message, at])
        return number

    def take(self, number: int, message: Any) -> Sequence[Any]:
        """What can be acted on now, in order: nothing while an earlier one is missing."""
        if number <= self.heard or number in self._early:
            self.num_repeated += 1
            return ()
        if len(self._early) < MAX_EARLY:
            self._early[number] = message
        found = []
        while self.heard + 1 in self._early:
            self.heard += 1
            found.append(self._early.pop(self.heard))
        return found

    def hear(self, heard: int) -> None:
        """The other end has taken every message up to this number."""
        while self._unheard and self._unheard[0][0] <= heard:
            self._unheard.popleft()

    @property
    def is_all_heard(self) -> bool:
        return not self._unheard

    def due(self, at: float) -> list[tuple[int, Any]]:
        """(number, message) to send again."""
        found = []
        for entry in self._unheard:
            if at - entry[2] >= RESEND_S:
                entry[2] = at
                found.append((entry[0], entry[1]))
        self.num_resent += len(found)
        return found
