"""A clock fitted to measured iterations. PURE."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from flexfloor.scheduling.cost import GroupLoad
from flexfloor.scheduling.loads import Floats, Loads

_MIN_ITERATIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedClock:
    """Linear in the load with coefficients that are never negative: more load never takes less time."""

    name: str
    fixed_s: float
    per_rank_s: float
    """Of each member; on shared cores it counts, on GPUs it stands for the all-to-all."""
    per_running_s: float
    """Of each running response of the group."""
    per_max_running_s: float
    """Of each response on the fullest rank."""
    per_context_token_s: float
    """Of each context token on the fullest rank."""
    prefill_tokens_per_s: float = 25_000.0
    switch_fixed_s: float = 0.3

    @classmethod
    def fit(
        cls,
        loads: Loads,
        seconds: Floats,
        *,
        name: str = "fitted",
        prefill_tokens_per_s: float = 25_000.0,
        switch_fixed_s: float = 0.3,
    ) -> "FittedClock":
        """Least squares of the relative error, `seconds` [n]; ValueError with fewer than 8 iterations."""
        num = int(seconds.shape[0])
        if num < _MIN_ITERATIONS or (seconds <= 0).any():
            raise ValueError(f"{num} iterations: a fit needs {_MIN_ITERATIONS}, all of them longer than 0 s")
        columns = (
            np.ones(num),
            loads.num_ranks,
            loads.num_running,
            loads.max_running,
            loads.max_context_tokens,
        )
        found = _nonnegative(np.stack(columns, axis=1) / seconds[:, None], np.ones(num))
        return cls(
            name=name,
            fixed_s=float(found[0]),
            per_rank_s=float(found[1]),
            per_running_s=float(found[2]),
            per_max_running_s=float(found[3]),
            per_context_token_s=float(found[4]),
            prefill_tokens_per_s=prefill_tokens_per_s,
            switch_fixed_s=switch_fixed_s,
        )

    def decode_s(self, load: GroupLoad) -> float:
        return float(self.decode_many_s(Loads.of(load))[0])

    def decode_many_s(self, loads: Loads) -> Floats:
        by_group = self.fixed_s + self.per_rank_s * loads.num_ranks + self.per_running_s * loads.num_running
        by_rank = self.per_max_running_s * loads.max_running
        return by_group + by_rank + self.per_context_token_s * loads.max_context_tokens

    def prefill_s(self, max_new_tokens: int) -> float:
        return max_new_tokens / self.prefill_tokens_per_s

    def switch_s(self, num_ranks_before: int, num_ranks_after: int) -> float:
        return self.switch_fixed_s


def _nonnegative(matrix: Floats, target: Floats) -> Floats:
    """Exact by trying every set of columns; with 5 of them these are 31 small solutions."""
    num = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    matrix = matrix / np.where(scale > 0, scale, 1.0)
    best, best_error = np.zeros(num), np.inf
    for count in range(1, num + 1):
        for chosen in combinations(range(num), count):
            part, *_ = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)
            error = float(np.square(matrix[:, chosen] @ part - target).sum())
            if (part >= 0).all() and error < best_error - 1e-12:
                best, best_error = np.zeros(num), error
                best[list(chosen)] = part
    return np.asarray(best / np.where(scale > 0, scale, 1.0), dtype=np.float64)
