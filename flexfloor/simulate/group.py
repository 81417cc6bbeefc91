"""The ranks of the simulated group together: one iteration, or a stretch of like ones. PURE."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexfloor.iterations import StepIterations
from flexfloor.scheduling.cost import GroupLoad
from flexfloor.simulate.rank import NEVER, Rank, Request
from flexfloor.simulate.rows import Rows

_RETRY_ITERATIONS = 16
"""A rank whose queue waits for KV room looks again so often; the engine does in every iteration."""


def _no_bound(num_members: int) -> int | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine was started with."""

    running_limit_per_rank: int = 256
    kv_tokens: Callable[[int], int | None] = _no_bound
    """KV pool of a rank in tokens, by the number of members; None: no bound."""
    max_prefill_tokens: int = 16384
    """Of one rank in one iteration; a single longer sequence is prefilled alone."""
    extra_iterations_after_end: int = 0
    """Overlap scheduling learns of an end an iteration late, and has started the next one by then."""
    decision_interval_iterations: int = 16
    """The release policy is asked so often, and whenever a rank has drained."""
    move_latency_iterations: int = 0
    """From an order to the end of the attempts that move."""
    release_latency_iterations: int = 0
    """From an order to the leavers being out. Nothing new is ordered meanwhile."""


class Group:
    """Arrays are by dp_rank; `context` counts prompt and generated tokens of the running responses."""

    def __init__(self, num_ranks: int, members: Sequence[int], limits: Limits) -> None:
        self.num_ranks = num_ranks
        self.limits = limits
        self.iteration = 0
        self.num_retractions = 0
        self._ranks = [
            Rank(
                running_limit=limits.running_limit_per_rank,
                max_prefill_tokens=limits.max_prefill_tokens,
                extra_iterations=limits.extra_iterations_after_end,
            )
            for _ in range(num_ranks)
        ]
        self._is_member = np.zeros(num_ranks, dtype=np.bool_)
        self._is_member[list(members)] = True
        self.members = tuple(sorted(members))
        self._kv_tokens = limits.kv_tokens(len(self.members))
        self._num_running = np.zeros(num_ranks, dtype=np.int64)
        self._context = np.zeros(num_ranks, dtype=np.int64)
        self._tick = np.zeros(num_ranks, dtype=np.int64)
        self._next_end = np.full(num_ranks, NEVER, dtype=np.int64)
        self._queued: dict[int, int] = {}
        """Ranks with a queue, and the iteration from which it is worth to look whether it moves."""
        self._rows = Rows(num_ranks)
        self._is_same = False
        self._prefill = np.zeros(num_ranks, dtype=np.int64)
        """Tokens of the coming iteration."""

    @property
    def is_without_tokens(self) -> bool:
        return not self._queued and not self._num_running.any()

    def holds(self, dp_rank: int, index: int) -> bool:
        return any(request.index == index for request, _, _ in self.requests_on(dp_rank))

    def requests_on(self, dp_rank: int) -> Iterator[tuple[Request, int, bool]]:
        """Request, its tokens so far, and whether it waits."""
        rank, tick = self._ranks[dp_rank], int(self._tick[dp_rank])
        for request in rank.running.values():
            yield request, rank.generated(request, tick), False
        for request in rank.queue:
            yield request, request.generated, True

    def enqueue(self, dp_rank: int, request: Request) -> None:
        self._ranks[dp_rank].queue.append(request)
        self._queued[dp_rank] = self.iteration

    def take_off(self, dp_rank: int, request: Request) -> None:
        """Ends the attempt there; the request keeps its tokens."""
        rank = self._ranks[dp_rank]
        if request.index in rank.running:
            self._remove(dp_rank, request)
            self._refresh(dp_rank)
        else:
            rank.queue.remove(request)
            if not rank.queue:
                self._queued.pop(dp_rank, None)

    def leave(self, leavers: Sequence[int]) -> None:
        self._is_member = self._is_member.copy()
        self._is_member[list(leavers)] = False
        self.members = tuple(int(rank) for rank in np.flatnonzero(self._is_member))
        self._kv_tokens = self.limits.kv_tokens(len(self.members))
        self._is_same = False

    def skip_to(self, iteration: int) -> None:
        self.iteration = max(self.iteration, iteration)

    def advance(self, horizon: int, before: Callable[[int], None]) -> None:
        """Runs the next iteration, or as many like ones as there are, at most `horizon`.

        `before` is called with their number when everything that they read is in place.
        """
        self._retract()
        admitted = self._admit()
        if admitted:
            before(1)
            self._prefill_iteration(admitted)
            return
        repeats = min(horizon, self._span())
        before(repeats)
        self._rows.decode(
            repeats,
            is_member=self._is_member,
            num_running=self._num_running,
            context_tokens=self._context,
            is_same=self._is_same,
        )
        self._is_same = True
        self._step(repeats, self._num_running)

    def pop_finished(self) -> list[tuple[int, Request]]:
        finished = []
        for dp_rank in np.flatnonzero(self._next_end <= self._tick).tolist():
            for request in list(self._ranks[dp_rank].pop_finished(int(self._tick[dp_rank]))):
                self._remove(dp_rank, request)
                finished.append((dp_rank, request))
            self._refresh(dp_rank)
        return finished

    def has_drained(self, finished: Sequence[tuple[int, Request]]) -> bool:
        return any(self._ranks[dp_rank].is_empty for dp_rank, _ in finished)

    def load(self, repeats: int) -> tuple[GroupLoad, int]:
        """Of the coming iterations, the context in their middle, and what the fullest rank prefills."""
        running = np.where(self._prefill > 0, 0, self._num_running)
        context = np.where(self._prefill > 0, 0, self._context) + running * (repeats - 1) // 2
        load = GroupLoad(
            num_ranks=len(self.members),
            num_running=int(running.sum()),
            max_running=int(running.max()),
            max_context_tokens=int(context.max()),
        )
        return load, int(self._prefill.max())

    def finish_rows(self) -> StepIterations:
        return self._rows.finish(self.num_retractions)

    def _admit(self) -> dict[int, list[Request]]:
        """What each rank prefills next."""
        admitted = {}
        self._prefill = np.zeros(self.num_ranks, dtype=np.int64)
        for dp_rank, look_at in list(self._queued.items()):
            if look_at > self.iteration:
                continue
            rank = self._ranks[dp_rank]
            free = None if self._kv_tokens is None else self._kv_tokens - int(self._context[dp_rank])
            requests = rank.admit(int(self._tick[dp_rank]), free)
            if requests:
                admitted[dp_rank] = requests
                self._prefill[dp_rank] = sum(request.prefill_tokens for request in requests)
            if not rank.queue:
                del self._queued[dp_rank]
            elif not requests:
                is_full = len(rank.running) >= rank.running_limit
                self._queued[dp_rank] = NEVER if is_full else self.iteration + _RETRY_ITERATIONS
        return admitted

    def _prefill_iteration(self, admitted: dict[int, list[Request]]) -> None:
        decodes = self._prefill == 0
        num_running = np.where(decodes, self._num_running, 0)
        self._rows.prefill(
            is_member=self._is_member,
            num_running=num_running,
            context_tokens=np.where(decodes, self._context, 0),
            prefill_tokens=self._prefill,
        )
        self._step(1, num_running)
        for dp_rank, requests in admitted.items():
            tick = int(self._tick[dp_rank])
            for request in requests:
                self._ranks[dp_rank].join(request, tick)
                self._context[dp_rank] += request.prefill_tokens
            self._num_running[dp_rank] += len(requests)
            self._refresh(dp_rank)

    def _step(self, repeats: int, num_running: NDArray[np.int64]) -> None:
        self._context += num_running * repeats
        self._tick += np.where(num_running > 0, repeats, 0)
        self.iteration += repeats

    def _span(self) -> int:
        """Iterations until a response ends, a pool is full, or a queue is looked at again."""
        is_running = self._num_running > 0
        spans = (self._next_end - self._tick)[is_running]
        span = int(spans.min())
        if self._kv_tokens is not None:
            # The last response of a rank goes on whatever the pool says, as nothing can be thrown back.
            is_bound = self._num_running > 1
            room = (self._kv_tokens - self._context[is_bound]) // self._num_running[is_bound] + 1
            span = min(span, int(room.min(initial=span)))
        looks = [look_at - self.iteration for look_at in self._queued.values()]
        return max(1, min([span, *looks]))

    def _retract(self) -> None:
        if self._kv_tokens is None:
            return
        over = self._context - self._kv_tokens
        for dp_rank in np.flatnonzero((over > 0) & (self._num_running > 1)).tolist():
            retracted = self._ranks[dp_rank].retract(int(self._tick[dp_rank]), int(over[dp_rank]))
            for _, held in retracted:
                self._num_running[dp_rank] -= 1
                self._context[dp_rank] -= held
            self.num_retractions += len(retracted)
            self._refresh(dp_rank)
            self._queued[dp_rank] = self.iteration + _RETRY_ITERATIONS

    def _remove(self, dp_rank: int, request: Request) -> None:
        held = self._ranks[dp_rank].remove(request, int(self._tick[dp_rank]))
        self._num_running[dp_rank] -= 1
        self._context[dp_rank] -= held

    def _refresh(self, dp_rank: int) -> None:
        """After the rank's batch changed: its next end, and a new look at its queue."""
        self._next_end[dp_rank] = self._ranks[dp_rank].next_end()
        self._is_same = False
        if dp_rank in self._queued:
            self._queued[dp_rank] = self.iteration
