"""Starts real servers for tests: free ports, a deadline on every wait, the log's tail in every error."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from flexfloor.errors import DeadlineExceeded
from flexfloor.processes import ChildProcess, ChildProcesses, tail
from flexfloor.rollout.ports import free_base_port

READY_DEADLINE_S = 600.0
"""A start is 15 s of imports in each of its processes: half a minute alone, minutes on a loaded machine."""
REQUEST_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One running server. Its processes end with the ChildProcesses that it was started in."""

    url: str
    num_ranks: int
    process: ChildProcess | None = None
    """None where somebody else started it and waited for it."""

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S) -> "Server":
        """Return once the warm-up request has run. Raises with the log's tail if the server ends first."""
        assert self.process is not None
        give_up_at_s = time.monotonic() + deadline_s
        while not self.is_ready():
            self.process.check()
            if time.monotonic() > give_up_at_s:
                log = tail(self.process.log_path)
                raise DeadlineExceeded(f"{self.url} was not ready within {deadline_s:g} s. Log:\n{log}")
            self.process.reap(timeout_s=0.25)
        return self

    def generate(self, **request: Any) -> Any:
        """Answer of /generate. Raises with its text for any status but 200."""
        return self._checked(requests.post(f"{self.url}/generate", json=request, timeout=REQUEST_DEADLINE_S))

    def post(self, route: str, **body: Any) -> Any:
        """Answer of a control route, e.g. `begin_weight_update`; None where it has no body."""
        return self._checked(self.raw_post(route, **body))

    def raw_post(self, route: str, **body: Any) -> requests.Response:
        """The reply whatever its status, for calls that are to be refused."""
        return requests.post(f"{self.url}/{route}", json=body, timeout=REQUEST_DEADLINE_S)

    def counters(self) -> list[dict[str, int]]:
        """Iteration counters of each rank, in rank order."""
        info = self._checked(requests.get(f"{self.url}/server_info", timeout=REQUEST_DEADLINE_S))
        return sorted(
            (state["flexfloor"] for state in info["internal_states"]), key=lambda row: row["dp_rank"]
        )

    def flush_cache(self) -> bool:
        """Whether every rank was idle and has flushed its cache."""
        return requests.post(f"{self.url}/flush_cache", timeout=REQUEST_DEADLINE_S).status_code == 200

    def is_ready(self) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    @staticmethod
    def _checked(answer: requests.Response) -> Any:
        assert answer.status_code == 200, f"{answer.url} answered {answer.status_code}: {answer.text}"
        return answer.json() if answer.content else None


def start_server(
    children: ChildProcesses,
    model_path: Path,
    num_ranks: int,
    log_path: Path,
    extra_args: Sequence[str] = (),
) -> Server:
    """Start a CPU server of `num_ranks` EP = attention-DP ranks; call `wait_ready` on it before use."""
    port = free_base_port()
    argv = [sys.executable, "-m", "sglang_patches.serve", *server_flags(model_path, num_ranks), *extra_args]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    process = children.start(f"server{num_ranks}", argv, log_path=log_path)
    return Server(url=f"http://127.0.0.1:{port}", num_ranks=num_ranks, process=process)


def server_flags(model_path: Path, num_ranks: int) -> list[str]:
    """Flags of a deterministic float32 CPU server without its port."""
    flags = ["--model-path", str(model_path), "--device", "cpu", "--dtype", "float32"]
    flags += ["--skip-tokenizer-init", "--max-total-tokens", "8192", "--enable-deterministic-inference"]
    flags += ["--incremental-streaming-output"]
    if num_ranks > 1:
        for name in ("--tp-size", "--ep-size", "--dp-size"):
            flags += [name, str(num_ranks)]
        flags += ["--enable-dp-attention", "--enable-dp-lm-head", "--moe-dense-tp-size", "1"]
    return flags
