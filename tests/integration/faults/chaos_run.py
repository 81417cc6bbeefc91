"""One `flexfloor-train` that is hit again and again, and what was seen of it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).parents[1] / "driver"))

from chaos_plan import Injection
from job import Job, resumed_job, running_job

from flexfloor.config.schema import MembershipConfig
from flexfloor.errors import DeadlineExceeded
from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint
from flexfloor.membership.status import MembershipStatus, RecoveryRecord
from flexfloor.rollout.ledger import read_ledger, step_path

HEARTBEAT_TIMEOUT_S = 8.0
POLL_S = 0.02
STATUS_TIMEOUT_S = 1.0
PHASE_DEADLINE_S = 240.0
"""For a phase to come: a start of the server may lie before it."""
STEP_DEADLINE_S = 600.0
END_DEADLINE_S = 90.0


@dataclass(slots=True)
class Hit:
    """What became of an injection."""

    injection: Injection
    step: int
    has_hit: bool = False
    seen: str = ""
    """What shows the phase."""
    at_s: float = 0.0
    until_next_step_s: float = 0.0

    def row(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "kind": self.injection.kind.name,
            "ep_rank": self.injection.ep_rank,
            "has_hit": self.has_hit,
            "seen": self.seen,
            "until_next_step_s": round(self.until_next_step_s, 1),
        }


class Watch:
    """Reads the membership of whatever server is there; remembers every recovery and lost rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_over = threading.Event()
        self.status: MembershipStatus | None = None
        self.recoveries: dict[tuple[str, int], RecoveryRecord] = {}
        self.lost: set[tuple[str, int]] = set()
        self._thread = threading.Thread(target=self._run, name="chaos-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._is_over.wait(POLL_S):
            with suppress(OSError, ValueError, DeadlineExceeded):
                self._follow(Endpoint.read(self._folder))

    def _follow(self, endpoint: Endpoint) -> None:
        """Until another server has the folder, or this one says nothing any more."""
        with DriverClient(endpoint, timeout_s=STATUS_TIMEOUT_S) as client:
            while not self._is_over.wait(POLL_S) and Endpoint.read(self._folder) == endpoint:
                try:
                    status = client.status()
                except DeadlineExceeded:
                    self.status = None
                    return
                self.status = status
                self.lost |= {(endpoint.fingerprint, rank) for rank in status.lost}
                for record in status.recoveries:
                    self.recoveries[endpoint.fingerprint, record.generation] = record


@dataclass(slots=True)
class ChaosRun:
    """`step` brings the run through one rollout step under these injections, whatever ends meanwhile."""

    folder: Path
    arguments: Sequence[str]
    num_steps: int
    hits: list[Hit] = field(default_factory=list)
    num_hangs: int = 0
    num_resumes: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)
    _job: Job = field(init=False)
    _watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.faults.mkdir(parents=True)
        arguments = [
            *self.arguments,
            "membership.floor=1",
            f"membership.folder={self.folder / 'm'}",
            f"{_heartbeat_key()}={HEARTBEAT_TIMEOUT_S}",
            f"+rollout.server_args.flexfloor-fault-folder={self.faults}",
            "rollout.stream_interval_tokens=2",
            "cluster.max_server_restarts=1000",
            "trainer.checkpoint_every_steps=1",
        ]
        self._watch = Watch(self.folder / "m")
        self._job = self._stack.enter_context(running_job(self.folder, arguments))

    @property
    def faults(self) -> Path:
        return self.folder / "faults"

    @property
    def run_dir(self) -> Path:
        return self._job.run_dir

    @property
    def recoveries(self) -> dict[tuple[str, int], RecoveryRecord]:
        return self._watch.recoveries

    @property
    def num_lost(self) -> int:
        return len(self._watch.lost)

    def step(self, step: int, injections: Sequence[Injection]) -> list[Hit]:
        self._go_on_until(lambda: self._job.num_steps() >= step, STEP_DEADLINE_S)
        hits = [Hit(injection, step) for injection in injections]
        armed = {id(hit): self._arm(hit) for hit in hits if _is_point(hit.injection)}
        threads = [threading.Thread(target=self._strike, args=(hit,)) for hit in hits if id(hit) not in armed]
        for thread in threads:
            thread.start()
        self._go_on_until(
            lambda: self._job.num_steps() > step and not any(thread.is_alive() for thread in threads),
            STEP_DEADLINE_S,
            hits,
            armed,
        )
        for hit in hits:
            hit.until_next_step_s = time.monotonic() - hit.at_s if hit.has_hit else 0.0
        for path in armed.values():
            path.unlink(missing_ok=True)
        self.hits += hits
        return hits

    def finish(self) -> None:
        self._go_on_until(
            lambda: self._job.process.poll() == 0 and self._job.num_steps() >= self.num_steps, STEP_DEADLINE_S
        )

    def close(self) -> None:
        self._watch.close()
        self._stack.close()

    # Going on.

    def _go_on_until(
        self,
        is_there: Callable[[], bool],
        limit_s: float,
        hits: Sequence[Hit] = (),
        armed: dict[int, Path] | None = None,
    ) -> None:
        """Resume a run that has ended. One that stands still for `limit_s` is a hang: it is ended first."""
        moved_at_s, seen = time.monotonic(), -1
        while not is_there():
            for hit in hits:
                path = (armed or {}).get(id(hit))
                if path is not None and not hit.has_hit and not path.exists():
                    hit.has_hit, hit.at_s, hit.seen = True, time.monotonic(), "the fault point took its file"
            if self._job.process.poll() is not None and not is_there():
                self._resume()
                moved_at_s = time.monotonic()
            if self._job.num_steps() != seen:
                moved_at_s, seen = time.monotonic(), self._job.num_steps()
            if time.monotonic() - moved_at_s > limit_s:
                self.num_hangs += 1
                print(f"hang at step {seen}: {self._watch.status}\n{self._job.text[-2000:]}", file=sys.stderr)
                self._end_job()
            time.sleep(POLL_S)

    def _resume(self) -> None:
        if self.num_resumes > 2 * self.num_steps + 10:
            raise SystemExit(f"the run does not go on:\n{self._job.text[-3000:]}")
        self.num_resumes += 1
        self._job = self._stack.enter_context(resumed_job(self.folder))

    def _end_job(self) -> None:
        below = self._job.descendants()
        self._job.kill()
        psutil.wait_procs(below, timeout=END_DEADLINE_S)

    # Injections.

    def _arm(self, hit: Hit) -> Path:
        """At the named point of a rank, which ends itself there."""
        injection = hit.injection
        path = self.faults / f"{injection.kind.action}-{injection.ep_rank}-{injection.kind.phase}"
        path.touch()
        return path

    def _strike(self, hit: Hit) -> None:
        """From outside, when the phase is there."""
        end_s, was_there = time.monotonic() + PHASE_DEADLINE_S, False
        while time.monotonic() < end_s and self._job.num_steps() <= hit.step:
            seen = self._phase(hit)
            if seen and not was_there and hit.injection.delay_s and hit.injection.kind.phase == "any":
                was_there = True
                time.sleep(hit.injection.delay_s)
                continue
            if seen and (killed := self._kill(hit)):
                hit.has_hit, hit.at_s, hit.seen = True, time.monotonic(), f"{seen}; {killed}"
                return
            time.sleep(POLL_S)

    def _phase(self, hit: Hit) -> str:
        """What shows that it is there; empty: it is not."""
        path = step_path(self.run_dir / "ledger", hit.step)
        match hit.injection.kind.phase:
            case "parked":
                status = self._watch.status
                parked = [] if status is None else [r for r, s in status.states.items() if s == "parked"]
                if not parked:
                    return ""
                # Whoever parks first, for not every rank does in every rollout.
                hit.injection = replace(hit.injection, ep_rank=parked[0])
                return "its state is parked"
            case "rollout" | "any":
                if not path.exists() or not (num := read_ledger(path).state.num_tokens):
                    return ""
                state = read_ledger(path).state
                is_whole = state.opened is not None and state.num_finished == state.opened.num_responses
                return "" if is_whole else f"{num} tokens on record, {state.num_finished} responses finished"
            case "train":
                if not path.exists():
                    return ""
                state = read_ledger(path).state
                is_whole = state.opened is not None and state.num_finished == state.opened.num_responses
                return f"all {state.num_finished} responses finished" if is_whole else ""
            case "sync":
                begun, ended = self._num_updates()
                return f"weight update {begun} begun, {ended} ended" if begun > ended else ""
            case "save":
                partial = next((self.run_dir / "checkpoints").glob("*.partial"), None)
                return f"{partial.name} is there" if partial is not None else ""
        raise AssertionError(hit.injection)

    def _num_updates(self) -> tuple[int, int]:
        """Begun and ended, of the server that was started last."""
        text = (self.run_dir / "logs" / "server.log").read_text(errors="replace")
        log = text.rpartition("server_args=")[2]
        return log.count("POST /begin_weight_update"), log.count("POST /end_weight_update")

    def _kill(self, hit: Hit) -> str:
        """Whom it killed; empty: nobody was there."""
        if hit.injection.kind.victim == "driver":
            pid = self._job.process.pid
            with suppress(psutil.Error, ProcessLookupError):
                self._end_job()
            return f"driver pid {pid}"
        for process in self._job.descendants():
            with suppress(psutil.Error, ProcessLookupError):
                if _is_victim(" ".join(process.cmdline()), process.name(), hit.injection):
                    number = signal.SIGSTOP if hit.injection.kind.action == "stop" else signal.SIGKILL
                    os.kill(process.pid, number)
                    return f"pid {process.pid}"
        return ""


def _heartbeat_key() -> str:
    if "heartbeat_timeout_s" in MembershipConfig.__dataclass_fields__:
        return "membership.heartbeat_timeout_s"
    return "+rollout.server_args.flexfloor-heartbeat-timeout-s"


def _is_point(injection: Injection) -> bool:
    return injection.kind.victim == "rank" and injection.kind.phase not in ("parked", "any")


def _is_victim(command: str, name: str, injection: Injection) -> bool:
    match injection.kind.victim:
        case "rank":
            return (
                f"scheduler_DP{injection.ep_rank}_" in command or f"scheduler_DP{injection.ep_rank}_" in name
            )
        case "server":
            return "sglang.launch_server" in command
        case "trainer":
            return "flexfloor.training.trainer" in command and "torch.distributed.run" not in command
    raise AssertionError(injection)
