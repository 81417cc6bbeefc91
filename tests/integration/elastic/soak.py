"""Random rollouts under random membership requests, each compared with the static group's answer."""

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from rollouts import Answer, Comparison, Request, compare, generate, make_requests, run_static
from server import Server

from flexfloor.errors import DeadlineExceeded
from flexfloor.membership.client import DriverClient

NUM_RANKS = 4
ROLLOUT_DEADLINE_S = 240.0


@dataclass(slots=True)
class SoakResult:
    num_rollouts: int = 0
    num_identical: int = 0
    num_hangs: int = 0
    num_tokens: int = 0
    num_near_ties: int = 0
    num_operations: int = 0
    num_refused: int = 0
    mismatches: list[str] = field(default_factory=list)

    def add(self, rollout: int, found: Comparison) -> None:
        self.num_rollouts += 1
        self.num_identical += not found.mismatches
        self.num_tokens += found.num_tokens
        self.num_near_ties += len(found.near_ties)
        if found.mismatches:
            self.mismatches.append(f"rollout {rollout}: {found.mismatches}")


def soak(
    server: Server, client: DriverClient, *, num_rollouts: int, seed: int, max_tokens: int = 48
) -> SoakResult:
    """Run `num_rollouts` random rollouts; stops at the first that hangs, as nothing after it would tell."""
    result = SoakResult()
    for rollout in range(num_rollouts):
        generator = random.Random(f"{seed}/{rollout}")
        requests = random_requests(generator, rollout, max_tokens)
        oracle = run_static(server, requests)
        try:
            answers = _under_fire(server, client, requests, generator, result)
            assert client.rejoin().ok
        except (TimeoutError, DeadlineExceeded, OSError) as error:
            result.num_hangs += 1
            result.mismatches.append(f"rollout {rollout}: {type(error).__name__}: {error}")
            return result
        result.add(rollout, compare(oracle, answers))
    return result


def random_requests(generator: random.Random, rollout: int, max_tokens: int) -> list[Request]:
    """A long tail of lengths; most requests name their rank; greedy, or seeded samples."""
    rows = [
        [max(1, int(max_tokens * generator.random() ** 3)) for _ in range(generator.randint(0, 4))]
        for _ in range(NUM_RANKS)
    ]
    requests = make_requests(rows, seed=rollout) or make_requests([[max_tokens], [], [], []], seed=rollout)
    is_sampled = generator.random() < 0.3
    return [
        replace(
            request,
            seed=index,
            is_sampled=is_sampled,
            dp_rank=None if generator.random() < 0.25 else request.dp_rank,
        )
        for index, request in enumerate(requests)
    ]


def _under_fire(
    server: Server,
    client: DriverClient,
    requests: Sequence[Request],
    generator: random.Random,
    result: SoakResult,
) -> list[Answer]:
    stop = threading.Event()
    with ThreadPoolExecutor(len(requests) + 1) as pool:
        membership = pool.submit(_random_changes, client, random.Random(generator.random()), stop, result)
        futures = []
        for request in requests:
            # Spread over the rollout, so that some meet a parked rank or a change in flight.
            if generator.random() < 0.4:
                time.sleep(generator.uniform(0.0, 0.1))
            futures.append(pool.submit(generate, server, request))
        try:
            return [future.result(ROLLOUT_DEADLINE_S) for future in futures]
        finally:
            stop.set()
            membership.result(ROLLOUT_DEADLINE_S)


def _random_changes(
    client: DriverClient, generator: random.Random, stop: threading.Event, result: SoakResult
) -> None:
    """Ask for releases and rejoins in any order, not waiting for most of them."""
    while not stop.wait(generator.uniform(0.0, 0.15)):
        result.num_operations += 1
        ranks = generator.sample(range(NUM_RANKS), generator.randint(1, NUM_RANKS - 1))
        match generator.random():
            case draw if draw < 0.5:
                client.submit_release(ranks)
            case draw if draw < 0.7:
                # Drained or not: a rank that is busy drains first, and the answer may take until then.
                client.submit_release(ranks[:1])
            case _:
                client.rejoin(ranks)
        result.num_refused += sum(not answer.ok for answer in client.poll())
