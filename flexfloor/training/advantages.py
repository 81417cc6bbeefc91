"""Group-normalised advantages: GRPO (arXiv:2402.03300, 4.1.2), or without its division (arXiv:2503.20783)."""

import math
from collections.abc import Sequence

from flexfloor.config.schema import AdvantageNorm

STD_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], norm: AdvantageNorm) -> list[float]:
    """Advantages of the responses of one prompt group, in the order of `rewards`.

    A group of one response, or one whose rewards are all equal, carries no preference: all its advantages are
    0.0 exactly, whatever rounding its mean has. The standard deviation is that of the group as a population.

    Raises:
        ValueError: `rewards` is empty or holds a value that is not finite.
    """
    if not rewards:
        raise ValueError("a prompt group needs at least one reward")
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if norm is AdvantageNorm.group_mean:
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    return [value / (std + STD_EPSILON) for value in centred]
