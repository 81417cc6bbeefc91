"""`release.use=slurm`: a node whose ranks have all exited leaves the SLURM job, for good.

    ranks exit > the node's launcher ends > its job step ends > scontrol update NodeList=the others

SLURM ends whatever step still runs on a node that leaves. So each node has a step of its own, and a node on
which any step goes on (a trainer's, the batch script's) is kept.
"""

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flexfloor.membership.events import Leave
from flexfloor.release.nodes import free_nodes, may_be_given_back, without
from flexfloor.release.use import Park

logger = logging.getLogger(__name__)

Runner = Callable[[Sequence[str]], str]
"""Runs a command and gives its standard output. Raises OSError, or ValueError saying why it failed."""

STEPS_END_TIMEOUT_S = 120.0
"""A launcher needs some seconds after its last rank has exited."""
POLL_INTERVAL_S = 0.5
COMMAND_TIMEOUT_S = 30.0
_NO_WORK = (".extern",)
"""SLURM's own step on every node of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBack:
    node: str
    at_s: float
    """Wall clock, seconds since the epoch: what SLURM's own times can be compared with."""
    refusal: str = ""
    """Why it was kept; empty: it has left the job."""


def run_command(argv: Sequence[str], *, folder: Path) -> str:
    """The Runner of real life; SLURM leaves its resize scripts in `folder`."""
    try:
        done = subprocess.run(
            list(argv), cwd=folder, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{' '.join(argv)}: no end in {COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise ValueError(f"{' '.join(argv)} failed with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


@dataclass(slots=True)
class SlurmUse(Park):
    """Ranks of the first node park, all others exit; their nodes are given back in the background."""

    job_id: str
    run: Runner
    clock: Callable[[], float] = time.time
    steps_end_timeout_s: float = STEPS_END_TIMEOUT_S
    given_back: list[GivenBack] = field(default_factory=list)
    """What became of each free node, in order."""
    _nodes: Mapping[int, str] = field(default_factory=dict)
    _exited: set[int] = field(default_factory=set)
    _asked: list[str] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _updating: threading.Lock = field(default_factory=threading.Lock)
    """The node list is read, then written."""

    def begin(self, nodes: Mapping[int, str]) -> None:
        self._nodes = nodes

    def leave_of(self, ep_rank: int) -> Leave:
        return Leave.exit if may_be_given_back(ep_rank, self._nodes) else Leave.park

    def left(self, ep_ranks: tuple[int, ...]) -> None:
        self._exited.update(rank for rank in ep_ranks if self.leave_of(rank) is Leave.exit)
        for node in free_nodes(self._nodes, self._exited):
            if node not in self._asked:
                self._asked.append(node)
                # A daemon: a run that is over before SLURM has answered ends the job, and the node with it.
                thread = threading.Thread(
                    target=self._give_back, args=(node,), name=f"give-back-{node}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Until SLURM has answered for every free node; False where it has not in time."""
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _give_back(self, node: str) -> None:
        try:
            self._wait_for_steps(node)
            with self._updating:
                left = without(self._job_nodes(), node)
                self.run(["scontrol", "update", f"JobId={self.job_id}", f"NodeList={','.join(left)}"])
            refusal = ""
            logger.info("event=give_back job=%s node=%s nodes_left=%d", self.job_id, node, len(left))
        except (OSError, ValueError) as error:
            refusal = str(error)
            logger.warning("node=%s stays in job %s: %s", node, self.job_id, refusal)
        self.given_back.append(GivenBack(node=node, at_s=self.clock(), refusal=refusal))

    def _wait_for_steps(self, node: str) -> None:
        end_s = time.monotonic() + self.steps_end_timeout_s
        while steps := self._steps_on(node):
            if time.monotonic() >= end_s:
                raise ValueError(
                    f"job steps {', '.join(steps)} still run on it {self.steps_end_timeout_s:g} s after its "
                    "ranks have exited"
                )
            time.sleep(POLL_INTERVAL_S)

    def _steps_on(self, node: str) -> list[str]:
        listed = self.run(["squeue", "--noheader", "--steps", f"--nodelist={node}", "--format=%i"])
        steps = [line.strip() for line in listed.splitlines() if line.strip()]
        own = [step for step in steps if step.startswith(f"{self.job_id}.")]
        return [step for step in own if not step.endswith(_NO_WORK)]

    def _job_nodes(self) -> list[str]:
        listed = self.run(["squeue", "--noheader", f"--jobs={self.job_id}", "--format=%N"]).strip()
        return self.run(["scontrol", "show", "hostnames", listed]).split()
