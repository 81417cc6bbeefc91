"""`release.use=command`: a command of the user's runs while workers are away."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from flexfloor.processes import ChildProcess, ChildProcesses
from flexfloor.release.use import Park

logger = logging.getLogger(__name__)

EP_RANKS_VARIABLE = "FLEXFLOOR_EP_RANKS"
NODES_VARIABLE = "FLEXFLOOR_NODES"


class CommandUse(Park):
    """One process for each set of ranks that leave together, started where the driver runs.

    Its environment names the ranks (`2,3`) and their machines in the same order, each once (`node1`). A
    command that ends by itself is left alone; one that still runs is ended (SIGTERM, then SIGKILL) as soon as
    one of its ranks is called back.
    """

    def __init__(self, command: Sequence[str], *, timeout_s: float, log_path: Path) -> None:
        self._command = list(command)
        self._log_path = log_path
        # ChildProcesses waits half of its timeout between the two signals.
        self._children = ChildProcesses(stop_timeout_s=2 * timeout_s)
        self._running: list[tuple[frozenset[int], ChildProcess]] = []
        self._nodes: Mapping[int, str] = {}

    def begin(self, nodes: Mapping[int, str]) -> None:
        self._nodes = nodes

    def left(self, ep_ranks: tuple[int, ...]) -> None:
        machines = dict.fromkeys(self._nodes[rank] for rank in ep_ranks)
        variables = {EP_RANKS_VARIABLE: ",".join(map(str, ep_ranks)), NODES_VARIABLE: ",".join(machines)}
        try:
            child = self._children.start(
                "release_command", self._command, env={**os.environ, **variables}, log_path=self._log_path
            )
        except OSError as error:
            # A step is worth more than what was to run beside it.
            logger.error("release.command=%s does not start: %s", self._command, error)
            return
        self._running.append((frozenset(ep_ranks), child))

    def recall(self, ep_ranks: tuple[int, ...], *, wait: bool) -> None:
        asked = [item for item in self._running if item[0].intersection(ep_ranks)]
        if not wait:
            for _, child in asked:
                child.terminate()
            return
        self._running = [item for item in self._running if item not in asked]
        for _, child in asked:
            if child.exit_code:
                logger.warning(
                    "release.command had ended with exit code %d; see %s", child.exit_code, self._log_path
                )
        if asked:
            self._children.stop(*(child for _, child in asked))

    def finish(self) -> None:
        self.recall(tuple(self._nodes), wait=True)
