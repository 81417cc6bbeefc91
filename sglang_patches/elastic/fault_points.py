"""Ends or stops a rank at a named point, to test what the others do. For tests only; off by default.

    touch FOLDER/kill-2-decode      ep_rank 2 kills itself at its next decode pass, like `kill -9`
    touch FOLDER/stop-1-gather      ep_rank 1 stops itself, like a hung process

The file is gone once the fault has hit, so a test can tell that it did.

Points: broadcast, gather, prefill, decode, idle (before these collectives of an iteration), prepare (a
change, in the background), switch, recovery (before its group is made), restored (before it is entered),
update (a call that changes weights).
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

_ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class FaultPoints:
    """Those of one rank."""

    def __init__(self, folder: str, ep_rank: int) -> None:
        self._folder = Path(folder) if folder else None
        self._ep_rank = ep_rank

    def at(self, point: str) -> None:
        """Perhaps the end."""
        if self._folder is None:
            return
        for action, number in _ACTIONS.items():
            with suppress(FileNotFoundError):
                (self._folder / f"{action}-{self._ep_rank}-{point}").unlink()
                os.kill(os.getpid(), number)
