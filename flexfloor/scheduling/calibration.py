"""How good length predictions were. PURE.

Every figure is reported, none is used to tune anything; the rank correlation alone may switch levers off.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flexfloor.scheduling.lengths import LengthPrediction

QUANTILES = {"p50": 0.5, "p90": 0.9}


def calibration(
    predictions: Mapping[str, LengthPrediction],
    lengths: Mapping[str, Sequence[int]],
    num_seen: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Predictions made before a step against the lengths in tokens that came, by prompt id.

    - `rank_correlation`: Spearman's, of the expected length against the mean length of the prompt's group;
      left out where it is undefined (fewer than 3 prompts, or all alike)
    - `coverage_p90`: share of responses at or below their p90; 0.9 is right, more where that is the cap
    - `pinball_p50`, `pinball_p90`: mean quantile loss, as a share of the mean length
    - `mean_abs_log_error`, `bias_log`: of ln(expected length) against ln(group mean); a bias above 0 says
      that predictions are too long
    - `share_seen`: prompts with any history, by `num_seen`; without it, those that have a prediction

    Prompts that lack a prediction or lengths count in `share_seen` only. Empty without any pair.
    """
    names = [name for name, drawn in lengths.items() if drawn and name in predictions]
    if not names:
        return {}
    expected = np.array([predictions[name].expected_tokens for name in names])
    means = np.array([np.mean(lengths[name]) for name in names])
    errors = np.log(np.maximum(1.0, expected)) - np.log(np.maximum(1.0, means))
    figures = {
        "mean_abs_log_error": float(np.abs(errors).mean()),
        "bias_log": float(errors.mean()),
        "share_seen": _share_seen(predictions, lengths, num_seen),
        **_quantile_figures(predictions, lengths, names),
    }
    correlation = rank_correlation(expected, means)
    return figures if correlation is None else {"rank_correlation": correlation, **figures}


def rank_correlation(
    first: Sequence[float] | NDArray[np.float64], second: Sequence[float] | NDArray[np.float64]
) -> float | None:
    """Spearman's: Pearson's correlation of the ranks, ties at their mean rank.

    None where it is undefined: fewer than 3 pairs, or all of one side alike.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values cannot be paired with {len(second)}")
    if len(first) < 3:
        return None
    one, other = _centred_ranks(first), _centred_ranks(second)
    scale = math.sqrt(float(one @ one) * float(other @ other))
    return float(one @ other) / scale if scale > 0 else None


def _centred_ranks(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    _, which, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[which]
    return np.asarray(ranks - ranks.mean(), dtype=np.float64)


def _share_seen(
    predictions: Mapping[str, LengthPrediction],
    lengths: Mapping[str, Sequence[int]],
    num_seen: Mapping[str, float] | None,
) -> float:
    if num_seen is None:
        return sum(name in predictions for name in lengths) / len(lengths)
    return sum(num_seen.get(name, 0.0) > 0 for name in lengths) / len(lengths)


def _quantile_figures(
    predictions: Mapping[str, LengthPrediction], lengths: Mapping[str, Sequence[int]], names: Sequence[str]
) -> dict[str, float]:
    drawn = np.concatenate([np.asarray(lengths[name], dtype=np.float64) for name in names])
    sizes = [len(lengths[name]) for name in names]
    figures = {}
    for label, share in QUANTILES.items():
        quantile = np.repeat([predictions[name].quantile_tokens(share) for name in names], sizes)
        over = drawn - quantile
        loss = np.maximum(share * over, (share - 1) * over).mean()
        figures[f"pinball_{label}"] = float(loss / max(1.0, drawn.mean()))
        if label == "p90":
            figures["coverage_p90"] = float((over <= 0).mean())
    return figures
