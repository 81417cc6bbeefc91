"""What is expected of a response's length before and while it runs. PURE.

A prompt's lengths are log-normal up to the cap, and beside that a share of its responses runs to the cap
(runaways): two numbers that a mean alone would hide.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPrediction:
    """The length of one prompt's next response, as a distribution."""

    mean_log: float
    """Mean of ln(tokens) of responses that do not run away."""
    sd_log: float
    """Standard deviation of a new draw: within the prompt, of the estimate, and of the model's drift."""
    cap_share: float
    """Probability of running to the cap."""
    cap_tokens: int

    @property
    def expected_tokens(self) -> float:
        """Mean length; what prompts are sorted by."""
        body = min(float(self.cap_tokens), math.exp(self.mean_log + self.sd_log**2 / 2))
        mixed = (1 - self.cap_share) * body + self.cap_share * self.cap_tokens
        # A mean of two caps may round to just above the cap.
        return min(float(self.cap_tokens), mixed)

    def remaining_tokens(self, generated_tokens: int) -> float:
        """What a running response that has `generated_tokens` is still expected to take, at most to the cap.

        Past one standard deviation above its mean a response says little more than that it is long: then
        three tenths of what it already has, as for a tail without a scale, and a thousandth of the cap.
        """
        ahead = math.exp(self.mean_log + self.sd_log) - generated_tokens
        late = 0.3 * generated_tokens + self.cap_tokens / 1024
        return min(float(max(0, self.cap_tokens - generated_tokens)), max(ahead, late))

    def quantile_tokens(self, share: float) -> int:
        """The length that a `share` of responses does not exceed; 0 < share < 1."""
        if not 0 < share < 1:
            raise ValueError(f"share={share}: a quantile lies between 0 and 1")
        if share >= 1 - self.cap_share:
            return self.cap_tokens
        if self.sd_log <= 0:
            body = math.exp(self.mean_log)
        else:
            body = math.exp(NormalDist(self.mean_log, self.sd_log).inv_cdf(share / (1 - self.cap_share)))
        return max(1, min(self.cap_tokens, round(body)))
