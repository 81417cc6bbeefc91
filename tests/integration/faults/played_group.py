"""The group of played ranks as a test sees it: starts them with a manager, sends work, kills, looks."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from played_ranks import NUM_EXPERTS, NUM_RANKS, Control, Work, run_rank, tokens_of

from flexfloor.membership.endpoint import Endpoint
from flexfloor.membership.manager import Manager
from flexfloor.membership.state import Membership
from flexfloor.membership.status import MembershipStatus, OperationResult

DEADLINE_S = 60.0

forked = multiprocessing.get_context("fork")


class PlayedServer:
    """The ranks and their manager. Example: server.send(0, Work("a", 3, 40)); server.kill(2)"""

    def __init__(
        self,
        folder: Path,
        *,
        floor: int = 1,
        heartbeat_timeout_s: float = 30.0,
        is_recurrent: bool = False,
    ) -> None:
        (folder / "faults").mkdir()
        self._is_recurrent = is_recurrent
        self._folder = folder
        self.abandoned: list[int] = []
        self.failed = threading.Event()
        self.reason = ""
        membership = Membership(
            ep_size=NUM_RANKS,
            floor=floor,
            num_experts=NUM_EXPERTS,
            prepare_timeout_s=20.0,
            recovers=True,
        )
        self.manager = Manager(
            Endpoint.local(folder / "membership"),
            membership,
            on_routing=lambda _routed, _members: None,
            on_fail=self._fail,
            on_abandon=self.abandoned.append,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        self._processes: list[BaseProcess] = []
        self._inboxes: list[Connection] = []
        self._outs: list[Connection] = []
        self._said: dict[str, list[int]] = {}
        self._controls: list[list[str]] = [[] for _ in range(NUM_RANKS)]
        for rank in range(NUM_RANKS):
            self._start(rank)
        self.manager.start()
        self.manager.wait_ready(DEADLINE_S)

    def _start(self, rank: int) -> None:
        inbox, to_rank = forked.Pipe(duplex=False)
        from_rank, out = forked.Pipe(duplex=False)
        log_path = self._folder / f"rank{rank}.log"
        process = forked.Process(
            target=run_rank,
            args=(rank, self._folder, inbox, out, log_path, self._is_recurrent),
            daemon=True,
        )
        process.start()
        inbox.close()
        out.close()
        self._processes.append(process)
        self._inboxes.append(to_rank)
        self._outs.append(from_rank)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(DEADLINE_S)
        self.manager.close()

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self._folder.glob("rank*.log")))

    def status(self) -> MembershipStatus:
        return self.manager.status()

    def send(self, rank: int, request: Work | Control) -> None:
        self._inboxes[rank].send(request)

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def exit_code(self, rank: int) -> int | None:
        return self._processes[rank].exitcode

    def arm(self, action: str, rank: int, point: str) -> Path:
        path = self._folder / "faults" / f"{action}-{rank}-{point}"
        path.touch()
        return path

    def tokens(self, name: str) -> list[int]:
        self._read()
        return self._said.get(name, [])

    def controls(self, rank: int) -> list[str]:
        self._read()
        return self._controls[rank]

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        give_up_at_s = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < give_up_at_s, f"not {what}: {self.status()}\n{self.logs()}"
            threading.Event().wait(0.005)

    def wait_lost(self, *ranks: int) -> None:
        self.wait(lambda: self.status().lost == ranks and not self.status().recovering, f"lost {ranks}")

    def wait_tokens(self, works: Sequence[Work], num_tokens: int) -> None:
        self.wait(
            lambda: all(len(self.tokens(work.name)) >= min(num_tokens, work.length) for work in works),
            f"{num_tokens} tokens",
        )

    def result(self, future: Future[OperationResult]) -> OperationResult:
        return future.result(DEADLINE_S)

    def assert_whole(self, works: Sequence[Work]) -> None:
        for work in works:
            self.wait(lambda: len(self.tokens(work.name)) >= work.length, f"{work} done")  # noqa: B023
            assert self.tokens(work.name) == tokens_of(work.seed, work.length), work

    def assert_right_so_far(self, works: Sequence[Work]) -> None:
        for work in works:
            found = self.tokens(work.name)
            assert found == tokens_of(work.seed, work.length)[: len(found)], work

    def _fail(self, reason: str) -> None:
        self.reason = reason
        self.failed.set()

    def _read(self) -> None:
        for rank, out in enumerate(self._outs):
            try:
                while out.poll():
                    name, kind, value = out.recv()
                    if name == "control":
                        self._controls[rank].append(kind)
                    else:
                        self._said.setdefault(name, []).append(value)
            except (EOFError, OSError):
                # The rank is dead, and everything that it said has been read.
                continue
