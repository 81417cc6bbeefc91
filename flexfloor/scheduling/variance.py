"""Variances of ln(tokens): between prompts, between passes, within a pass; a line over prompt length. PURE.

Moment estimators of a random-effects analysis of variance (Searle, Casella and McCulloch, Variance
Components, 1992, chapter 3) over decayed sums, each blended with its starting value as if that had been seen
in some groups already, so that the first few groups do not throw them about.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

PRIOR_SHARES = (0.55, 0.08, 0.37)
"""Of sigma squared: between prompts, between passes of a prompt, within a pass."""
PRIOR_GROUPS = 8.0
MIN_VARIANCE = 1e-4
MIN_LINE_GROUPS = 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variances:
    """Of ln(tokens), natural logarithms squared."""

    between: float
    """Between prompts; what is left of it beside the line over the prompt's length."""
    passes: float
    """Of one prompt between passes."""
    within: float
    """Between responses of one prompt in one pass, those at the cap aside."""


class VarianceFit:
    """Sums over groups (the responses of one prompt in one step) and the variances that follow from them."""

    def __init__(self, sigma: float) -> None:
        between, passes, within = (share * sigma**2 for share in PRIOR_SHARES)
        self._prior = Variances(between=between, passes=passes, within=within)
        self.variances = self._prior
        self._within_squares = 0.0
        self._within_freedom = 0.0
        self._differences = 0.0
        """Sum of (squared difference of two passes' means, half) and of the part that draws explain."""
        self._difference_noise = 0.0
        self._num_differences = 0.0
        self._groups = 0.0
        self._means = 0.0
        self._mean_squares = 0.0
        self._inverse_sizes = 0.0
        # Of the groups whose prompt's length is known: count, x, y, xx, xy, yy.
        self._line_sums = [0.0] * 6
        self._slope = 0.0
        self._centre = 0.0

    def decay(self, factor: float) -> None:
        """Make everything so far count less."""
        for name in (
            "_within_squares",
            "_within_freedom",
            "_differences",
            "_difference_noise",
            "_num_differences",
            "_groups",
            "_means",
            "_mean_squares",
            "_inverse_sizes",
        ):
            setattr(self, name, getattr(self, name) * factor)
        self._line_sums = [total * factor for total in self._line_sums]

    def add_within(self, logs: Sequence[float]) -> None:
        """Responses of one prompt in one step."""
        if len(logs) < 2:
            return
        mean = math.fsum(logs) / len(logs)
        self._within_squares += math.fsum((log - mean) ** 2 for log in logs)
        self._within_freedom += len(logs) - 1

    def add_group(self, deviation: float, size: int, features: float | None) -> None:
        """Mean deviation of a group from the model's level; `features` is ln(prompt tokens), if known."""
        self._groups += 1
        self._means += deviation
        self._mean_squares += deviation**2
        self._inverse_sizes += 1 / size
        if features is not None:
            x, y = features, deviation
            added = (1.0, x, y, x * x, x * y, y * y)
            self._line_sums = [total + one for total, one in zip(self._line_sums, added, strict=True)]

    def add_difference(self, difference: float, size_before: int, size_now: int) -> None:
        """Of a prompt's mean deviations in two passes that follow each other."""
        self._differences += difference**2 / 2
        self._difference_noise += (1 / max(1, size_before) + 1 / size_now) / 2
        self._num_differences += 1

    def line(self, features: float | None) -> float:
        """Expected deviation of a prompt by its length."""
        return 0.0 if features is None else self._slope * (features - self._centre)

    def pass_correlation(self) -> float:
        """Of the mean deviations of prompts in two passes, groups being as large as those seen."""
        fit = self.variances
        noise = fit.passes + fit.within * self._inverse_sizes / max(1.0, self._groups)
        return fit.between / (fit.between + noise)

    def refit(self) -> None:
        prior = self._prior
        within = (self._within_squares + PRIOR_GROUPS * prior.within) / (self._within_freedom + PRIOR_GROUPS)
        passes = _blend(
            self._differences - within * self._difference_noise, self._num_differences, prior.passes
        )
        explained = self._fit_line()
        noise = passes * self._groups + within * self._inverse_sizes
        squares = self._mean_squares - self._means**2 / self._groups if self._groups else 0.0
        between = _blend(squares * (1 - explained) - noise, self._groups, prior.between)
        self.variances = Variances(between=between, passes=passes, within=max(MIN_VARIANCE, within))

    def _fit_line(self) -> float:
        """Share of the groups' variance that the line explains, adjusted for chance; sets the line."""
        count, x, y, xx, xy, yy = self._line_sums
        self._slope = 0.0
        if count < MIN_LINE_GROUPS:
            return 0.0
        var_x, var_y = xx / count - (x / count) ** 2, yy / count - (y / count) ** 2
        covariance = xy / count - x * y / count**2
        if var_x <= 1e-9 or var_y <= 1e-9:
            return 0.0
        share = min(1.0, covariance**2 / (var_x * var_y))
        adjusted = 1 - (1 - share) * (count - 1) / (count - 2)
        if adjusted <= 0:
            return 0.0
        # Shrunk by what chance alone would have explained.
        self._slope = covariance / var_x * adjusted / share
        self._centre = x / count
        return adjusted


def _blend(net_sum: float, count: float, prior: float) -> float:
    return max(MIN_VARIANCE, (net_sum + PRIOR_GROUPS * prior) / (count + PRIOR_GROUPS))
