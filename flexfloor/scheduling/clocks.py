"""Clocks: one that counts, the GPU model, one for tokens that stand for more, one that corrects itself. PURE.

Nothing here was measured on a GPU; which constants are guesses stands beside them.
"""

from dataclasses import dataclass, field

import numpy as np

from flexfloor.scheduling.cost import Clock, GroupLoad
from flexfloor.scheduling.fitted_clock import FittedClock as FittedClock
from flexfloor.scheduling.gpu_clock import GPUS as GPUS
from flexfloor.scheduling.gpu_clock import H20 as H20
from flexfloor.scheduling.gpu_clock import H100 as H100
from flexfloor.scheduling.gpu_clock import H200 as H200
from flexfloor.scheduling.gpu_clock import QWEN3_30B_A3B as QWEN3_30B_A3B
from flexfloor.scheduling.gpu_clock import GpuClock as GpuClock
from flexfloor.scheduling.gpu_clock import GpuSpec as GpuSpec
from flexfloor.scheduling.gpu_clock import ModelNumbers as ModelNumbers
from flexfloor.scheduling.loads import Floats, Loads, decode_many_s

_PRIOR_WEIGHT = 1.0
"""Observations that the clock as it was counts for, in each term. With far fewer, simulated runs whose
iterations were timed to 10 % moved on a chance reading and lost up to 7 % of their throughput; with ten, a
clock that is wrong in two constants was believed for too long."""
_MOST_SURPRISE = 1.5
"""A stall of the machine is not the model's time: no iteration counts for more than this against expected."""
_LEAST_SHARE = 0.05
"""Of what the clock predicted, whatever it is corrected to."""

NAMES = ("neutral", *GPUS)


def make_clock(name: str, model: ModelNumbers = QWEN3_30B_A3B) -> Clock:
    """`neutral` or a kind of GPU: h100, h200, h20. ValueError names them."""
    if name == "neutral":
        return NeutralClock()
    if name not in GPUS:
        raise ValueError(f"clock {name!r}: choose one of {', '.join(NAMES)}")
    return GpuClock(spec=GPUS[name], model=model)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeutralClock:
    """Counts iterations: each is 1, whatever its load; a prefill is an iteration, a switch costs nothing.

    Under it a smaller group wins by construction, for a rank costs nothing but its own time.
    """

    name: str = "neutral"

    def decode_s(self, load: GroupLoad) -> float:
        return 1.0

    def decode_many_s(self, loads: Loads) -> Floats:
        return np.ones_like(loads.num_ranks)

    def prefill_s(self, max_new_tokens: int) -> float:
        return 0.0

    def switch_s(self, num_ranks_before: int, num_ranks_after: int) -> float:
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledClock:
    """One token of the run stands for `model_tokens_per_token` tokens of the model that the clock knows.

    So an iteration stands for k iterations with k times the context, a prefill for one of k times the tokens,
    and a switch stays one switch: small runs would otherwise weigh a switch too much and the KV cache too
    little. Results are shown at two values of k.
    """

    clock: Clock
    model_tokens_per_token: int

    def __post_init__(self) -> None:
        if self.model_tokens_per_token < 1:
            raise ValueError(f"model_tokens_per_token={self.model_tokens_per_token}: at least 1")

    @property
    def name(self) -> str:
        return f"{self.clock.name}, 1 token = {self.model_tokens_per_token}"

    def decode_s(self, load: GroupLoad) -> float:
        return float(self.decode_many_s(Loads.of(load))[0])

    def decode_many_s(self, loads: Loads) -> Floats:
        factor = self.model_tokens_per_token
        scaled = Loads(
            num_ranks=loads.num_ranks,
            num_running=loads.num_running,
            max_running=loads.max_running,
            max_context_tokens=loads.max_context_tokens * factor,
        )
        return factor * decode_many_s(self.clock, scaled)

    def prefill_s(self, max_new_tokens: int) -> float:
        return self.clock.prefill_s(max_new_tokens * self.model_tokens_per_token)

    def switch_s(self, num_ranks_before: int, num_ranks_after: int) -> float:
        return self.clock.switch_s(num_ranks_before, num_ranks_after)


@dataclass(slots=True, kw_only=True)
class CorrectedClock:
    """A clock corrected by what iterations took: predicted x slope + offset + per_share / ranks.

    Clocks are wrong by seconds of every iteration (launches, latency), by a share of them (bandwidth), or
    by what a rank's share of the experts takes. A factor for each size would take the first for the second:
    found where few responses are left, it prices a smaller group far too low where many are. Ridge regression
    on relative errors, so that what has not been seen stays as the clock has it. Lives as long as a run.
    """

    clock: Clock
    memory: int = 2000
    """Observations after which an old one counts for a third."""
    _products: Floats = field(default_factory=lambda: np.eye(3) * _PRIOR_WEIGHT)
    _sums: Floats = field(default_factory=lambda: np.zeros(3))
    _scale_s: float = 0.0
    """Of the first iteration: makes the three terms alike."""
    _terms: Floats = field(default_factory=lambda: np.zeros(3))
    """Of predicted, one, and one / ranks."""

    @property
    def name(self) -> str:
        return f"{self.clock.name}, corrected"

    def observe(self, *, num_ranks: int, predicted_s: float, observed_s: float) -> None:
        """One measured iteration or a mean over several; `predicted_s` is the inner clock's."""
        if predicted_s <= 0 or observed_s <= 0:
            raise ValueError(f"predicted_s={predicted_s}, observed_s={observed_s}: iterations take time")
        self._scale_s = self._scale_s or predicted_s
        expected_s = self.corrected_s(num_ranks, predicted_s)
        observed_s = min(max(observed_s, expected_s / _MOST_SURPRISE), expected_s * _MOST_SURPRISE)
        features = self._features(np.array([predicted_s]), np.array([float(num_ranks)]))[:, 0] / predicted_s
        prior = np.eye(3) * _PRIOR_WEIGHT
        keep = 1 - 1 / self.memory
        self._products = prior + keep * (self._products - prior) + np.outer(features, features)
        self._sums = keep * self._sums + features * (observed_s / predicted_s - 1)
        self._terms = np.asarray(np.linalg.solve(self._products, self._sums), dtype=np.float64)

    def corrected_s(self, num_ranks: float, predicted_s: float) -> float:
        """What is to be expected of an iteration that the inner clock predicts so long."""
        return float(self._corrected(np.array([predicted_s]), np.array([float(num_ranks)]))[0])

    def decode_s(self, load: GroupLoad) -> float:
        return self.corrected_s(load.num_ranks, self.clock.decode_s(load))

    def decode_many_s(self, loads: Loads) -> Floats:
        return self._corrected(decode_many_s(self.clock, loads), loads.num_ranks)

    def prefill_s(self, max_new_tokens: int) -> float:
        return self.clock.prefill_s(max_new_tokens)

    def switch_s(self, num_ranks_before: int, num_ranks_after: int) -> float:
        return self.clock.switch_s(num_ranks_before, num_ranks_after)

    def _corrected(self, predicted_s: Floats, num_ranks: Floats) -> Floats:
        corrected_s = predicted_s + self._terms @ self._features(predicted_s, num_ranks)
        return np.asarray(np.maximum(corrected_s, _LEAST_SHARE * predicted_s), dtype=np.float64)

    def _features(self, predicted_s: Floats, num_ranks: Floats) -> Floats:
        """[3, n] seconds"""
        return np.stack([predicted_s, np.full_like(predicted_s, self._scale_s), self._scale_s / num_ranks])
