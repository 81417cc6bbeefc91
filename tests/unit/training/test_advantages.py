import math

import pytest

from flexfloor.config.schema import AdvantageNorm
from flexfloor.training.advantages import group_advantages


def test_group_std_by_hand() -> None:
    # mean 0.5, population standard deviation 0.5
    found = group_advantages([1.0, 0.0, 0.0, 1.0], AdvantageNorm.group_std)
    assert found == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=1e-5)
    assert found[0] == 0.5 / (0.5 + 1e-6)


def test_group_mean_by_hand() -> None:
    assert group_advantages([3.0, 0.0, 0.0], AdvantageNorm.group_mean) == [2.0, -1.0, -1.0]


def test_unequal_rewards_sum_to_zero_with_unit_spread() -> None:
    found = group_advantages([0.1, 0.7, 0.3, 2.0, -1.0], AdvantageNorm.group_std)
    assert math.fsum(found) == pytest.approx(0.0, abs=1e-12)
    assert math.sqrt(math.fsum(value * value for value in found) / 5) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("norm", list(AdvantageNorm))
@pytest.mark.parametrize("rewards", [[0.7], [0.1] * 3, [1.0] * 16])
def test_no_preference_is_exactly_zero(norm: AdvantageNorm, rewards: list[float]) -> None:
    """The mean of three times 0.1 is not 0.1 in floating point, and the epsilon would blow up the rest."""
    assert group_advantages(rewards, norm) == [0.0] * len(rewards)


def test_what_is_no_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        group_advantages([], AdvantageNorm.group_std)
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, math.nan], AdvantageNorm.group_mean)
