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
    """A clock times what it was wrong by, per group size, as an exponentially weighted mean.

    A size that was never seen takes the factor of the nearest one that was. Lives as long as a run.
    """

    clock: Clock
    weight: float = 0.3
    """Of the newest observation."""
    factors: dict[int, float] = field(default_factory=dict)
    """observed / predicted by number of ranks."""

    @property
    def name(self) -> str:
        return f"{self.clock.name}, corrected"

    def observe(self, *, num_ranks: int, predicted_s: float, observed_s: float) -> None:
        """One measured iteration or a mean over several; `predicted_s` is the inner clock's."""
        if predicted_s <= 0 or observed_s <= 0:
            raise ValueError(f"predicted_s={predicted_s}, observed_s={observed_s}: iterations take time")
        new, old = observed_s / predicted_s, self.factors.get(num_ranks)
        self.factors[num_ranks] = new if old is None else old + self.weight * (new - old)

    def factor(self, num_ranks: float) -> float:
        if not self.factors:
            return 1.0
        return self.factors[min(self.factors, key=lambda size: (abs(size - num_ranks), size))]

    def decode_s(self, load: GroupLoad) -> float:
        return self.factor(load.num_ranks) * self.clock.decode_s(load)

    def decode_many_s(self, loads: Loads) -> Floats:
        factors = np.array([self.factor(size) for size in loads.num_ranks], dtype=np.float64)
        return factors * decode_many_s(self.clock, loads)

    def prefill_s(self, max_new_tokens: int) -> float:
        return self.clock.prefill_s(max_new_tokens)

    def switch_s(self, num_ranks_before: int, num_ranks_after: int) -> float:
        return self.clock.switch_s(num_ranks_before, num_ranks_after)
