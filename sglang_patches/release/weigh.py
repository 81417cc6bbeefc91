"""Whether letting drained ranks go pays, by FlexFloor's cost model, for `--flexfloor-release policy`. PURE.

The server knows no prompt's history, so every response is expected to be like those that it has answered.
Moves are left out: a response belongs to the client that waits for it here.
"""

import math
from collections.abc import Iterable, Sequence

from flexfloor.scheduling.clocks import make_clock
from flexfloor.scheduling.decision import GroupView, RunningResponse
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.release import DRAINED, CostBasedRelease
from sglang_patches.release.tracker import SentRequest

_PRIOR_WEIGHT = 8.0
"""Responses that the guess before the first one counts for."""
_PRIOR_SD_LOG = 0.9
"""Of ln(tokens); 0.7 to 1.0 is usual for mathematics."""
_PRIOR_CAP_SHARE = 0.005
_ASK_EVERY_TOKENS = 16
"""Of any response, unless another rank drains."""


class SeenLengths:
    """Lengths of the responses that this server has answered, as one distribution."""

    def __init__(self) -> None:
        self._num = 0.0
        self._num_capped = 0.0
        self._sum = 0.0
        self._sum_of_squares = 0.0

    def add(self, num_tokens: int, cap_tokens: int) -> None:
        """`num_tokens` 0, an abort at once, says nothing."""
        if num_tokens < 1:
            return
        if num_tokens >= cap_tokens:
            self._num_capped += 1
            return
        self._num += 1
        self._sum += math.log(num_tokens)
        self._sum_of_squares += math.log(num_tokens) ** 2

    def prediction(self, cap_tokens: int) -> LengthPrediction:
        """Of the next response with this cap."""
        # An eighth of the cap is where caps stand that cut a few per cent.
        guess = math.log(max(1.0, cap_tokens / 8))
        weight = self._num + _PRIOR_WEIGHT
        mean = (self._sum + _PRIOR_WEIGHT * guess) / weight
        spread = self._sum_of_squares + _PRIOR_WEIGHT * (guess**2 + _PRIOR_SD_LOG**2)
        num_all = self._num + self._num_capped + _PRIOR_WEIGHT
        return LengthPrediction(
            mean_log=mean,
            sd_log=math.sqrt(max(1e-3, spread / weight - mean**2)),
            cap_share=(self._num_capped + _PRIOR_WEIGHT * _PRIOR_CAP_SHARE) / num_all,
            cap_tokens=cap_tokens,
        )


class CostWeigher:
    """Asks the cost-based policy, once there is something new to ask about."""

    def __init__(self, clock_name: str, num_ranks: int, floor: int) -> None:
        self._clock = make_clock(clock_name)
        self._num_ranks = num_ranks
        self._floor = floor
        self.lengths = SeenLengths()
        self._asked: tuple[tuple[int, ...], int] | None = None
        self.last_reason = ""
        """Of the last answer."""
        self.begin_step()

    def begin_step(self) -> None:
        """A policy remembers one step."""
        self._policy = CostBasedRelease(
            clock=self._clock, num_ranks=self._num_ranks, floor=self._floor, profile=DRAINED
        )
        self._asked = None

    def leavers(
        self, idle: Sequence[int], members: Sequence[int], requests: Iterable[SentRequest], at_s: float
    ) -> tuple[int, ...]:
        """Of the drained ranks `idle`, those whose leaving pays; `at_s` since the step began."""
        running = [request for request in requests if request.dp_rank is not None]
        most_tokens = max((request.num_tokens for request in running), default=0)
        asked = (tuple(idle), most_tokens // _ASK_EVERY_TOKENS)
        if asked == self._asked or not running:
            return ()
        self._asked = asked
        decision = self._policy.decide(self._view(members, running, at_s))
        self.last_reason = decision.reason
        return tuple(rank for rank in decision.leavers if rank in idle)

    def _view(self, members: Sequence[int], running: Sequence[SentRequest], at_s: float) -> GroupView:
        ranks: list[list[RunningResponse]] = [[] for _ in range(self._num_ranks)]
        predictions: dict[int, LengthPrediction] = {}
        for request in running:
            assert request.dp_rank is not None, "the caller looked"
            cap_tokens = request.cap_tokens
            if cap_tokens not in predictions:
                predictions[cap_tokens] = self.lengths.prediction(cap_tokens)
            ranks[request.dp_rank].append(
                RunningResponse(
                    response_id=request.request_id,
                    prompt_tokens=request.prompt_tokens,
                    generated_tokens=request.num_tokens,
                    prediction=predictions[cap_tokens],
                )
            )
        return GroupView(
            at_s=at_s,
            num_ranks=self._num_ranks,
            members=tuple(members),
            responses=tuple(map(tuple, ranks)),
        )
