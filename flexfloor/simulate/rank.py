"""One rank of the simulated engine: its queue, what it decodes, and its KV pool. PURE.

Time is the rank's own count of decode iterations (`tick`): a running response has its tokens at joining plus
the ticks since. The rules are those of SGLang 0.5.23's scheduler: first come first served; a new response is
let in where the pool holds its tokens, what it may still take (at most CLIP_NEW_TOKENS) and a share of what
the running ones may still take; where the pool runs over, those with the fewest tokens are thrown back.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

CLIP_NEW_TOKENS = 4096
"""Most that counts of what a response may still take (`SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION`)."""
FIRST_NEW_TOKEN_SHARE = 0.7
"""Share of what running responses may still take that is kept free; it falls without retractions ..."""
LEAST_NEW_TOKEN_SHARE = 0.098
SHARE_DECAY_ITERATIONS = 600
"""... to the least in so many iterations (`SGLANG_INIT_NEW_TOKEN_RATIO` and its companions)."""
RETRACT_DECODE_STEPS = 20
"""After a retraction the share is chosen so that so many more iterations fit."""
NEVER = 2**62


@dataclass(slots=True, kw_only=True)
class Request:
    """A response in the engine. `num_tokens` is the truth, which no policy sees."""

    index: int
    prompt_tokens: int
    num_tokens: int
    max_new_tokens: int
    generated: int = 0
    """Tokens when it last joined a batch or left one."""
    joined_tick: int = 0
    attempt: int = 0
    """Counts joinings, so that an entry of an earlier one is known as stale."""

    @property
    def prefill_tokens(self) -> int:
        return self.prompt_tokens + self.generated


@dataclass(slots=True)
class Rank:
    """State between two iterations. Counts and context are kept by the group, in arrays over ranks."""

    running_limit: int
    max_prefill_tokens: int
    extra_iterations: int
    queue: deque[Request] = field(default_factory=deque)
    running: dict[int, Request] = field(default_factory=dict)
    ends: list[tuple[int, int, int]] = field(default_factory=list)
    """Heap of (tick of the last iteration's end, index, attempt)."""
    share: float = FIRST_NEW_TOKEN_SHARE
    share_tick: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.running and not self.queue

    def generated(self, request: Request, tick: int) -> int:
        extra = tick - request.joined_tick
        return min(request.generated + extra, request.num_tokens)

    def admit(self, tick: int, free_tokens: int | None) -> list[Request]:
        """Takes from the queue what is prefilled next; `free_tokens` are those of the KV pool, None: any."""
        admitted: list[Request] = []
        budget, room = self.max_prefill_tokens, self._room(tick, free_tokens)
        while self.queue and len(self.running) + len(admitted) < self.running_limit:
            request = self.queue[0]
            need = request.prefill_tokens
            may_take = need + min(request.max_new_tokens - request.generated, CLIP_NEW_TOKENS)
            is_first = not self.running and not admitted
            if (admitted and need > budget) or (may_take >= room and not is_first):
                break
            admitted.append(self.queue.popleft())
            budget, room = budget - need, room - may_take
        return admitted

    def _room(self, tick: int, free_tokens: int | None) -> float:
        if free_tokens is None:
            return float("inf")
        fall = (FIRST_NEW_TOKEN_SHARE - LEAST_NEW_TOKEN_SHARE) / SHARE_DECAY_ITERATIONS
        share = max(LEAST_NEW_TOKEN_SHARE, self.share - fall * (tick - self.share_tick))
        kept = sum(
            min(request.max_new_tokens - self.generated(request, tick), CLIP_NEW_TOKENS)
            for request in self.running.values()
        )
        return free_tokens - share * kept

    def join(self, request: Request, tick: int) -> None:
        """After its prefill, which gave it a token."""
        request.generated += 1
        request.joined_tick = tick
        request.attempt += 1
        self.running[request.index] = request
        end = tick + request.num_tokens - request.generated + self.extra_iterations
        heapq.heappush(self.ends, (end, request.index, request.attempt))

    def remove(self, request: Request, tick: int) -> int:
        """Out of the batch, with the tokens so far; the KV tokens that it held."""
        held = request.prefill_tokens + tick - request.joined_tick
        request.generated = self.generated(request, tick)
        del self.running[request.index]
        return held

    def next_end(self) -> int:
        """Tick at which the next response is through."""
        while self.ends:
            end, index, attempt = self.ends[0]
            request = self.running.get(index)
            if request is not None and request.attempt == attempt:
                return end
            heapq.heappop(self.ends)
        return NEVER

    def pop_finished(self, tick: int) -> Iterator[Request]:
        while self.next_end() <= tick:
            yield self.running[heapq.heappop(self.ends)[1]]

    def retract(self, tick: int, over_tokens: int) -> list[tuple[Request, int]]:
        """Throws back until so many KV tokens are free; never the last response."""
        order = sorted(
            self.running.values(), key=lambda request: (-self.generated(request, tick), request.prompt_tokens)
        )
        retracted: list[tuple[Request, int]] = []
        freed = 0
        while freed < over_tokens and len(order) > 1:
            request = order.pop()
            held = self.remove(request, tick)
            # It also takes no token in the coming iteration; `held` counts that one already.
            freed += held
            retracted.append((request, held))
            self.queue.append(request)
        if retracted:
            tokens = sum(self.generated(request, tick) + RETRACT_DECODE_STEPS for request in order)
            self.share = min(1.0, tokens / (sum(request.max_new_tokens for request in order) + 1))
            self.share_tick = tick
        return retracted
