"""Rollouts against a real server whose ranks leave and return, and what they must be equal to."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from server import Server

from flexfloor.membership.client import DriverClient
from flexfloor.membership.status import OperationResult

MAX_LOGPROB_DIFFERENCE = 1e-4
NEAR_TIE = 1e-4
"""Float sums in another order may swap two tokens whose logits are closer than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    prompt: tuple[int, ...]
    num_tokens: int
    dp_rank: int | None
    seed: int = 0
    is_sampled: bool = False
    """At temperature 1; otherwise greedy. The same for all requests of a rollout: SGLang draws another way
    where a batch holds a greedy request, so that a seed alone does not fix the token then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    """Between the logprobs of the two likeliest tokens, per token."""
    num_retractions: int
    logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class Comparison:
    """Differences between two runs of the same requests."""

    num_tokens: int = 0
    near_ties: list[tuple[int, int, float]] = field(default_factory=list)
    """(request, position, gap) of first differences that float rounding explains."""
    mismatches: list[tuple[int, int, float]] = field(default_factory=list)
    max_logprob_difference: float = 0.0
    """Over all tokens up to the first difference."""


def make_requests(lengths_by_rank: Sequence[Sequence[int]], *, seed: int = 0) -> list[Request]:
    """One request per length, on the rank of its row; prompts differ and depend on the seed only."""
    requests = []
    for rank, lengths in enumerate(lengths_by_rank):
        for index, length in enumerate(lengths):
            start = seed * 7 + rank * 5 + index * 3
            prompt = tuple(4 + (start + k * (k + seed)) % 28 for k in range(3 + index % 4))
            requests.append(Request(prompt=prompt, num_tokens=length, dp_rank=rank))
    return requests


def generate(server: Server, request: Request) -> Answer:
    params = {
        "max_new_tokens": request.num_tokens,
        "ignore_eos": True,
        "temperature": 1.0 if request.is_sampled else 0.0,
        "sampling_seed": request.seed,
    }
    reply = server.generate(
        input_ids=list(request.prompt),
        sampling_params=params,
        routed_dp_rank=request.dp_rank,
        return_logprob=True,
        top_logprobs_num=2,
    )
    meta = reply["meta_info"]
    gaps = tuple(abs(top[0][0] - top[1][0]) for top in meta["output_top_logprobs"])
    return Answer(
        tokens=tuple(reply["output_ids"]),
        gaps=gaps,
        num_retractions=meta["num_retractions"],
        logprobs=tuple(row[0] for row in meta["output_token_logprobs"]),
    )


def run_static(server: Server, requests: Sequence[Request]) -> list[Answer]:
    """All requests at once; nobody leaves."""
    with ThreadPoolExecutor(max(1, len(requests))) as pool:
        return list(pool.map(lambda request: generate(server, request), requests))


def run_elastic(
    server: Server,
    client: DriverClient,
    requests: Sequence[Request],
    *,
    floor: int = 1,
    may_leave: Callable[[int], bool] = lambda _rank: True,
) -> tuple[list[Answer], list[OperationResult]]:
    """All requests at once; each rank leaves when its own are done, as long as the floor allows."""
    releases = _Releases(client, requests, floor, may_leave)

    def one(request: Request) -> Answer:
        answer = generate(server, request)
        releases.finished(request)
        return answer

    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(one, requests))
    return answers, releases.results


class _Releases:
    """Releases each rank once its last response is done. One client, so one caller at a time."""

    def __init__(
        self, client: DriverClient, requests: Sequence[Request], floor: int, may_leave: Callable[[int], bool]
    ) -> None:
        self._client = client
        self._floor = floor
        self._may_leave = may_leave
        self._lock = threading.Lock()
        self._left = {rank: 0 for rank in range(4)}
        for request in requests:
            if request.dp_rank is not None:
                self._left[request.dp_rank] += 1
        self._inside = set(self._left)
        self.results: list[OperationResult] = []

    def finished(self, request: Request) -> None:
        if request.dp_rank is None:
            return
        with self._lock:
            self._left[request.dp_rank] -= 1
            leaves = (
                self._left[request.dp_rank] == 0
                and len(self._inside) > self._floor
                and self._may_leave(request.dp_rank)
            )
            if leaves:
                self._inside.remove(request.dp_rank)
                self.results.append(self._client.release([request.dp_rank]))


def compare(oracle: Sequence[Answer], answers: Sequence[Answer]) -> Comparison:
    """First difference of each request; after it the two texts are different texts."""
    found = Comparison()
    for index, (expected, answer) in enumerate(zip(oracle, answers, strict=True)):
        found.num_tokens += len(expected.tokens)
        found.max_logprob_difference = max(
            found.max_logprob_difference, _logprob_difference(expected, answer)
        )
        if expected.tokens == answer.tokens:
            continue
        pairs = zip(expected.tokens, answer.tokens, strict=False)
        position = next((k for k, (a, b) in enumerate(pairs) if a != b), len(answer.tokens))
        gap = expected.gaps[position] if position < len(expected.gaps) else float("inf")
        (found.near_ties if gap < NEAR_TIE else found.mismatches).append((index, position, gap))
    return found


def _logprob_difference(expected: Answer, answer: Answer) -> float:
    difference = 0.0
    for a, b, p, q in zip(expected.tokens, answer.tokens, expected.logprobs, answer.logprobs, strict=False):
        if a != b:
            break
        difference = max(difference, abs(p - q))
    return difference


def assert_same(oracle: Sequence[Answer], answers: Sequence[Answer]) -> None:
    found = compare(oracle, answers)
    assert not found.mismatches, f"tokens differ (request, position, gap of the oracle): {found.mismatches}"
    assert found.max_logprob_difference <= MAX_LOGPROB_DIFFERENCE
    assert len(found.near_ties) <= max(1, found.num_tokens // 100_000)
