"""Figures of the predictor's error, against ones worked out by hand."""

import math

import pytest

from flexfloor.scheduling.calibration import calibration, rank_correlation
from flexfloor.scheduling.lengths import LengthPrediction


def certain(tokens: float, cap: int = 10_000) -> LengthPrediction:
    return LengthPrediction(mean_log=math.log(tokens), sd_log=0.0, cap_share=0.0, cap_tokens=cap)


def test_figures_of_a_small_step() -> None:
    figures = calibration(
        {"a": certain(100), "b": certain(200), "c": certain(400)},
        {"a": [100, 100], "b": [100, 100], "c": [500, 300], "d": [70]},
        num_seen={"a": 3.0, "b": 8.0},
    )
    # b alone is off, by 100 too many; c's p90 (400) leaves one of its two above.
    assert figures["bias_log"] == pytest.approx(math.log(2) / 3)
    assert figures["mean_abs_log_error"] == pytest.approx(math.log(2) / 3)
    assert figures["coverage_p90"] == pytest.approx(5 / 6)
    assert figures["share_seen"] == 0.5
    assert figures["pinball_p50"] == pytest.approx((50 + 50 + 50 + 50) / 6 / 200)
    assert figures["pinball_p90"] == pytest.approx((10 + 10 + 90 + 10) / 6 / 200)
    # Ranks 1 2 3 against 1.5 1.5 3.
    assert figures["rank_correlation"] == pytest.approx(math.sqrt(3) / 2)


def test_nothing_to_compare_gives_no_figures() -> None:
    assert calibration({}, {"a": [1]}) == {}
    assert calibration({"a": certain(5)}, {"a": []}) == {}


def test_an_undefined_rank_correlation_is_left_out() -> None:
    figures = calibration({"a": certain(5), "b": certain(6)}, {"a": [5], "b": [6]})
    assert "rank_correlation" not in figures
    assert figures["bias_log"] == pytest.approx(0)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    with pytest.raises(ValueError, match="3 values cannot be paired with 2"):
        rank_correlation([1, 2, 3], [1, 2])


@pytest.mark.parametrize(("other", "value"), [([2, 4, 9, 10], 1), ([9, 8, 3, 1], -1), ([1, 3, 2, 4], 0.8)])
def test_rank_correlation(other: list[float], value: float) -> None:
    assert rank_correlation([1, 2, 3, 4], other) == pytest.approx(value)
