"""A server whose ranks are killed and stopped, and requests that are watched token by token."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import requests

sys.path.append(str(Path(__file__).parents[1] / "sglang"))
sys.path.append(str(Path(__file__).parents[1] / "elastic"))

from server import READY_DEADLINE_S, Server, start_server

from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint
from flexfloor.membership.status import MembershipStatus
from flexfloor.processes import ChildProcesses

NUM_RANKS = 4
DEADLINE_S = 90.0


@dataclass(slots=True)
class Stream:
    """One request, as its client sees it while it runs."""

    prompt: tuple[int, ...]
    num_tokens: int
    dp_rank: int | None
    tokens: list[int] = field(default_factory=list)
    finish: dict[str, object] | None = None
    error: str = ""
    ended_at_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        return (
            self.finish is not None
            and self.finish["type"] == "length"
            and len(self.tokens) == self.num_tokens
        )

    @property
    def lost_rank_message(self) -> str:
        return str(self.finish["message"]) if self.finish and self.finish["type"] == "abort" else ""


class FaultyServer:
    """Example: with FaultyServer.start(children, checkpoint, folder) as faulty: faulty.kill(2)"""

    def __init__(self, server: Server, membership_folder: Path, fault_folder: Path) -> None:
        self.server = server
        self.fault_folder = fault_folder
        self._membership_folder = membership_folder
        self._client: DriverClient | None = None

    @classmethod
    def start(
        cls,
        children: ChildProcesses,
        checkpoint: Path,
        folder: Path,
        *flags: str,
        collectives: str = "shm",
        heartbeat_timeout_s: float = 5.0,
    ) -> "FaultyServer":
        (folder / "faults").mkdir()
        own = ["--flexfloor-membership", "elastic", "--flexfloor-collectives", collectives]
        own += [
            "--flexfloor-folder",
            str(folder / "membership"),
            "--flexfloor-fault-folder",
            str(folder / "faults"),
        ]
        own += ["--flexfloor-recovery", "on", "--flexfloor-heartbeat-timeout-s", str(heartbeat_timeout_s)]
        server = start_server(children, checkpoint, NUM_RANKS, folder / "server.log", [*own, *flags])
        return cls(server, folder / "membership", folder / "faults")

    def wait_ready(self) -> "FaultyServer":
        self.server.wait_ready(READY_DEADLINE_S)
        return self

    @property
    def client(self) -> DriverClient:
        if self._client is None:
            self._client = DriverClient(Endpoint.read(self._membership_folder), timeout_s=DEADLINE_S)
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def status(self) -> MembershipStatus:
        return self.client.status()

    def pids(self) -> dict[int, int]:
        return {row["dp_rank"]: row["pid"] for row in self.server.counters()}

    def arm(self, action: str, ep_rank: int, point: str) -> Path:
        """The fault is in place; it has hit when the file is gone."""
        path = self.fault_folder / f"{action}-{ep_rank}-{point}"
        path.touch()
        return path

    def send(self, streams: Sequence[Stream]) -> "Running":
        return Running(self.server.url, streams)

    def run(self, streams: Sequence[Stream]) -> Sequence[Stream]:
        running = self.send(streams)
        running.join()
        return streams

    def wait_for(self, is_so: Callable[[MembershipStatus], bool]) -> MembershipStatus:
        give_up_at_s = time.monotonic() + DEADLINE_S
        while not is_so(status := self.status()):
            assert time.monotonic() < give_up_at_s, status
            threading.Event().wait(0.02)
        return status


class Running:
    """Streams in flight, a thread each."""

    def __init__(self, url: str, streams: Sequence[Stream]) -> None:
        self.streams = streams
        self._url = url
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._read, args=(stream,)) for stream in streams]
        for thread in self._threads:
            thread.start()

    def wait_tokens(self, num_tokens: int, *, of: Callable[[Stream], bool] = lambda _stream: True) -> None:
        """Until each of these streams has so many tokens, or has ended."""
        with self._changed:
            chosen = [stream for stream in self.streams if of(stream)]
            assert self._changed.wait_for(
                lambda: all(len(s.tokens) >= num_tokens or s.finish or s.error for s in chosen), DEADLINE_S
            ), chosen

    def join(self) -> None:
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), [stream for stream in self.streams if stream.finish is None]

    def _read(self, stream: Stream) -> None:
        params = {"max_new_tokens": stream.num_tokens, "ignore_eos": True, "temperature": 0.0}
        body = {
            "input_ids": list(stream.prompt),
            "sampling_params": params,
            "stream": True,
            "return_logprob": True,
        }
        body["routed_dp_rank"] = stream.dp_rank
        try:
            with requests.post(f"{self._url}/generate", json=body, stream=True, timeout=DEADLINE_S) as answer:
                for line in answer.iter_lines():
                    if line.startswith(b"data: {"):
                        self._take(stream, json.loads(line[6:]))
        except requests.RequestException as error:
            stream.error = repr(error)
        with self._changed:
            stream.ended_at_s = time.monotonic()
            self._changed.notify_all()

    def _take(self, stream: Stream, event: dict[str, object]) -> None:
        meta = event.get("meta_info")
        with self._changed:
            if not isinstance(meta, dict):
                stream.error = str(event)
                return
            tokens = event["output_ids"]
            assert isinstance(tokens, list)
            assert len(meta["output_token_logprobs"]) == len(tokens), event
            stream.tokens += tokens
            stream.finish = meta["finish_reason"]
            self._changed.notify_all()


def make_streams(
    lengths: Sequence[int], *, seed: int, ranks: Sequence[int] = range(NUM_RANKS)
) -> list[Stream]:
    """For each of the ranks one request of every length; prompts depend on rank, place and seed only."""
    return [
        Stream(
            tuple(4 + (seed * 7 + rank * 5 + place * 3 + k * (k + seed)) % 28 for k in range(3 + place)),
            length,
            rank,
        )
        for rank in ranks
        for place, length in enumerate(lengths)
    ]


def again(
    streams: Sequence[Stream], *, dp_rank: Callable[[Stream], int | None] | None = None
) -> list[Stream]:
    """The same requests, not yet sent."""
    return [Stream(s.prompt, s.num_tokens, s.dp_rank if dp_rank is None else dp_rank(s)) for s in streams]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)
