"""Delays at named points, to test that no order of events between ranks breaks anything. Off by default."""

import random
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayConfig:
    """Sleep `min_s` to `max_s` at a point with this probability, drawn from the seed per rank."""

    probability: float = 0.0
    min_s: float = 0.2
    max_s: float = 2.0
    seed: int = 0


class Delays:
    """One rank's delays. Each thread of the rank owns an instance."""

    def __init__(self, config: DelayConfig, ep_rank: int, thread: str) -> None:
        self._config = config
        self._random = random.Random(f"{config.seed}/{ep_rank}/{thread}")
        self.num_delays = 0

    def at(self, point: str) -> None:
        """Perhaps sleep. `point` is what a debugger or log shows."""
        if self._config.probability and self._random.random() < self._config.probability:
            self.num_delays += 1
            time.sleep(self._random.uniform(self._config.min_s, self._config.max_s))
