"""How long the next response of a prompt will be, from the responses that came before. PURE.

The logarithm of a length is taken as the sum of four parts:

    ln(tokens) = level(step) + a(prompt) + b(prompt, pass) + e(response)

`level` is the model's own drift: a random walk that each step's residuals correct (a Kalman filter of one
number), so a batch of only short prompts does not look like a model that became terse. `a` is estimated by
the prompt's mean deviation from the level, older passes weighing less, shrunk towards 0, or towards a line
over the prompt's length where that line explains anything. The variances of a, b and e come from an analysis
of variance over what was observed, starting at the shares of a lognormal study. No clock, no randomness:
the same observations in the same order give the same predictions.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from flexfloor.scheduling.calibration import rank_correlation
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.observation import LengthObservation, by_step
from flexfloor.scheduling.variance import VarianceFit, Variances

SIGMA = 0.9
"""Standard deviation of ln(tokens) over a dataset, before any was seen; 0.7 to 1.0 is usual for math."""
PASS_DECAY = 0.5
"""Weight of a pass relative to the next one."""
LEVEL_STEP_SD = 0.05
"""How far the level moves in a step. Published runs drift by up to 3 % a step."""
OTHER_RUN_SD = 1.0
"""How far it may be off at the start of another run, which may be another model's."""
CAP_PRIOR_WEIGHT = 4.0
"""Responses that the dataset's share of capped responses counts for in a prompt's own share."""
CAP_PRIOR_SHARE = 0.005
"""That share before anything was seen."""
CORRELATION_STEPS = 8
"""Compared at once: a bucketed step alone holds prompts of like length, whose order says little."""
MIN_CORRELATION_PAIRS = 16

_STANDARD = NormalDist()


@dataclass(slots=True)
class _PromptHistory:
    """Decayed sums over a prompt's responses."""

    visit: tuple[str, int]
    weight: float = 0.0
    deviation_sum: float = 0.0
    """Of ln(tokens) less the level when it came."""
    num_passes: float = 0.0
    capped: float = 0.0
    features: float | None = None
    visit_mean: float = 0.0
    """Mean deviation of the visit so far, for the difference to the next one."""
    visit_size: int = 0


@dataclass(slots=True)
class _Group:
    """The responses of one prompt in one step."""

    prompt_id: str
    logs: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    is_capped: list[bool] = field(default_factory=list)
    capped: float = 0.0
    prompt_tokens: int = 0

    @property
    def mean(self) -> float:
        return math.fsum(self.logs) / len(self.logs)


class Predictor:
    """Predictions for the prompts of one dataset under one cap, in tokens."""

    def __init__(
        self,
        *,
        cap_tokens: int,
        sigma: float = SIGMA,
        pass_decay: float = PASS_DECAY,
        level_step_sd: float = LEVEL_STEP_SD,
    ) -> None:
        if cap_tokens < 1:
            raise ValueError(f"cap_tokens={cap_tokens}: no response fits")
        if sigma <= 0 or level_step_sd < 0 or not 0 < pass_decay <= 1:
            raise ValueError(f"sigma={sigma}, level_step_sd={level_step_sd}, pass_decay={pass_decay}")
        self.cap_tokens = cap_tokens
        self._pass_decay = pass_decay
        self._level_step_sd = level_step_sd
        # An eighth of the cap is where caps stand that cut a few per cent; the first step replaces it.
        self._level = math.log(max(1.0, cap_tokens / 8))
        self._level_variance = OTHER_RUN_SD**2
        self._fit = VarianceFit(sigma)
        self._prompts: dict[str, _PromptHistory] = {}
        self._num_responses = 0.0
        self._num_capped = 0.0
        self._dataset: str | None = None
        self._visit: tuple[str, int] | None = None
        self._recent: deque[list[tuple[float, float]]] = deque(maxlen=CORRELATION_STEPS)

    @classmethod
    def from_history(
        cls, observations: Iterable[LengthObservation], *, cap_tokens: int, sigma: float = SIGMA
    ) -> "Predictor":
        """A predictor that saw these observations, step after step in the order given."""
        predictor = cls(cap_tokens=cap_tokens, sigma=sigma)
        for step in by_step(observations):
            predictor.observe(step)
        return predictor

    @property
    def variances(self) -> Variances:
        """Of ln(tokens): between prompts, of a prompt between passes, within a pass."""
        return self._fit.variances

    @property
    def level_tokens(self) -> float:
        """Geometric mean length of the model now."""
        return math.exp(self._level)

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's, of what was predicted for prompts with history against the mean lengths that came.

        Over the last steps; None until enough prompts came a second time.
        """
        pairs = [pair for step in self._recent for pair in step]
        if len(pairs) < MIN_CORRELATION_PAIRS:
            return None
        return rank_correlation([first for first, _ in pairs], [second for _, second in pairs])

    def window_rank_correlation(self, prompt_ids: Sequence[str]) -> float | None:
        """What to expect of predictions for these prompts: `rank_correlation`, or a forecast of it.

        When a second pass begins nothing was compared yet. Then it is the correlation of a prompt's means in
        two passes that the variances imply, between / (between + passes + within / group size). None where
        fewer than half of the prompts were ever seen.
        """
        num_seen = sum(prompt_id in self._prompts for prompt_id in prompt_ids)
        if num_seen == 0 or 2 * num_seen < len(prompt_ids):
            return None
        measured = self.rank_correlation
        return self._fit.pass_correlation() if measured is None else measured

    def num_seen(self, prompt_id: str) -> float:
        """Responses that a prediction rests on, those of older passes counting less; 0: never seen."""
        known = self._prompts.get(prompt_id)
        return known.weight if known else 0.0

    def predict(self, prompt_id: str, prompt_tokens: int | None = None) -> LengthPrediction:
        """The next response of a prompt; of one that was never seen, what is usual in the dataset.

        `prompt_tokens` helps with a new prompt, if lengths of prompts and responses go together at all.
        """
        known = self._prompts.get(prompt_id)
        features = known.features if known and known.features is not None else _features(prompt_tokens)
        deviation, uncertainty = self._deviation(known, features)
        variances = self.variances
        spread = variances.within + variances.passes + uncertainty + min(self._level_variance, 0.1)
        cap_share = self._cap_share(known)
        mean_log = self._without_capped(self._level + deviation, known, cap_share)
        return LengthPrediction(
            mean_log=mean_log,
            sd_log=math.sqrt(spread),
            cap_share=cap_share,
            cap_tokens=self.cap_tokens,
        )

    def observe(self, observations: Sequence[LengthObservation]) -> None:
        """Take in the responses of one rollout step; ValueError if they are of another dataset."""
        if not observations:
            return
        self._check(observations)
        visit = observations[0].run_id, max(one.pass_index for one in observations)
        self._enter(visit)
        groups = self._groups(observations)
        self._recent.append(self._comparison(groups))
        self._move_level(groups)
        for group in groups:
            self._learn(group, visit)
        self._fit.refit()

    def _check(self, observations: Sequence[LengthObservation]) -> None:
        datasets = {one.dataset for one in observations} | ({self._dataset} if self._dataset else set())
        if len(datasets) > 1:
            raise ValueError(f"observations of {len(datasets)} datasets, {', '.join(sorted(datasets))}")
        if len({(one.run_id, one.rollout_step) for one in observations}) > 1:
            raise ValueError("observations of several rollout steps at once; see by_step")
        self._dataset = observations[0].dataset

    def _enter(self, visit: tuple[str, int]) -> None:
        before = self._visit
        self._level_variance += self._level_step_sd**2
        if before is None:
            self._visit = visit
        if before is None or (before[0] == visit[0] and before[1] >= visit[1]):
            return
        self._visit = visit
        self._fit.decay(self._pass_decay)
        self._num_responses *= self._pass_decay
        self._num_capped *= self._pass_decay
        if before[0] != visit[0]:
            self._level_variance += OTHER_RUN_SD**2

    def _groups(self, observations: Sequence[LengthObservation]) -> list[_Group]:
        groups: dict[str, _Group] = {}
        for one in observations:
            group = groups.setdefault(one.prompt_id, _Group(one.prompt_id))
            log, capped = self._log_and_capped(one)
            group.logs.append(log)
            group.tokens.append(min(one.num_tokens, self.cap_tokens))
            group.is_capped.append(capped > 0)
            group.capped += capped
            group.prompt_tokens = one.prompt_tokens
        return list(groups.values())

    def _log_and_capped(self, one: LengthObservation) -> tuple[float, float]:
        """ln(tokens) under our cap, and how much of a capped response it is.

        One that a lower cap ended is at least that long: the chance that it would have reached our cap, and
        the mean of the prediction's upper tail in its place.
        """
        highest = math.log(self.cap_tokens)
        if one.num_tokens >= self.cap_tokens:
            return highest, 1.0
        log = math.log(max(1, one.num_tokens))
        if not one.is_truncated:
            return log, 0.0
        expected = self.predict(one.prompt_id, one.prompt_tokens)
        own, cap = _tail(expected, log), _tail(expected, highest)
        reaches = (expected.cap_share + (1 - expected.cap_share) * cap) / (
            expected.cap_share + (1 - expected.cap_share) * own
        )
        body = min(highest, max(log, _upper_mean(expected, log)))
        return reaches * highest + (1 - reaches) * body, reaches

    def _comparison(self, groups: Sequence[_Group]) -> list[tuple[float, float]]:
        return [
            (self.predict(group.prompt_id).expected_tokens, sum(group.tokens) / len(group.tokens))
            for group in groups
            if group.prompt_id in self._prompts
        ]

    def _move_level(self, groups: Sequence[_Group]) -> None:
        variances = self.variances
        weights, residuals = [], []
        for group in groups:
            deviation, uncertainty = self._deviation(
                self._prompts.get(group.prompt_id), _features(group.prompt_tokens)
            )
            noise = uncertainty + variances.passes + variances.within / len(group.logs)
            weights.append(1 / noise)
            residuals.append(group.mean - self._level - deviation)
        precision = math.fsum(weights)
        residual = math.fsum(w * r for w, r in zip(weights, residuals, strict=True)) / precision
        gain = self._level_variance / (self._level_variance + 1 / precision)
        self._level += gain * residual
        self._level_variance *= 1 - gain

    def _learn(self, group: _Group, visit: tuple[str, int]) -> None:
        known = self._prompts.get(group.prompt_id)
        if known is None:
            known = self._prompts[group.prompt_id] = _PromptHistory(visit, num_passes=1.0)
        elif known.visit != visit:
            self._next_visit(known, group, visit)
        known.features = _features(group.prompt_tokens) or known.features
        deviation = group.mean - self._level
        size = len(group.logs)
        known.visit_mean += (deviation - known.visit_mean) * size / (known.visit_size + size)
        known.visit_size += size
        known.weight += size
        known.deviation_sum += deviation * size
        known.capped += group.capped
        self._num_responses += size
        self._num_capped += group.capped
        self._fit.add_within(
            [log for log, capped in zip(group.logs, group.is_capped, strict=True) if not capped]
        )
        self._fit.add_group(deviation, size, known.features)

    def _next_visit(self, known: _PromptHistory, group: _Group, visit: tuple[str, int]) -> None:
        same_run = known.visit[0] == visit[0]
        fade = self._pass_decay ** (max(1, visit[1] - known.visit[1]) if same_run else 1)
        known.weight *= fade
        known.deviation_sum *= fade
        known.capped *= fade
        known.num_passes = known.num_passes * fade + 1
        difference = group.mean - self._level - known.visit_mean
        self._fit.add_difference(difference, known.visit_size, len(group.logs))
        known.visit, known.visit_mean, known.visit_size = visit, 0.0, 0

    def _deviation(self, known: _PromptHistory | None, features: float | None) -> tuple[float, float]:
        """Of a prompt from the level, and the variance of that estimate."""
        variances = self.variances
        usual = self._fit.line(features)
        if known is None or known.weight <= 0:
            return usual, variances.between
        share = self._shrinkage(known)
        return usual + share * (known.deviation_sum / known.weight - usual), variances.between * (1 - share)

    def _without_capped(self, mean_log: float, known: _PromptHistory | None, cap_share: float) -> float:
        """The mean counts capped responses as the cap; a prediction names their share beside it.

        So what they added comes out again, though less the more of a prompt's responses reached the cap: of
        one whose responses all did, nothing says that others would be shorter. The square did as well as no
        such care in a study of calibration, and keeps the remaining length of such prompts long.
        """
        highest = math.log(self.cap_tokens)
        in_mean, own_share = self._usual_cap_share(), 0.0
        if known is not None and known.weight > 0:
            own = self._shrinkage(known)
            own_share = known.capped / known.weight
            in_mean = own * own_share + (1 - own) * in_mean
        capped = min(cap_share, in_mean) * (1 - own_share**2)
        return min(highest, max(0.0, (mean_log - capped * highest) / (1 - capped)))

    def _shrinkage(self, known: _PromptHistory) -> float:
        """How much a prompt's own mean counts against what is usual."""
        variances = self.variances
        noise = variances.within / known.weight + variances.passes / known.num_passes
        return variances.between / (variances.between + noise)

    def _cap_share(self, known: _PromptHistory | None) -> float:
        usual = self._usual_cap_share()
        if known is None:
            return usual
        return (known.capped + CAP_PRIOR_WEIGHT * usual) / (known.weight + CAP_PRIOR_WEIGHT)

    def _usual_cap_share(self) -> float:
        prior = CAP_PRIOR_WEIGHT * CAP_PRIOR_SHARE
        return (self._num_capped + prior) / (self._num_responses + CAP_PRIOR_WEIGHT)


def _features(prompt_tokens: int | None) -> float | None:
    return math.log(prompt_tokens) if prompt_tokens else None


def _tail(prediction: LengthPrediction, log: float) -> float:
    """Chance of a longer response, those that run away left out."""
    return max(1e-9, 1 - _STANDARD.cdf((log - prediction.mean_log) / prediction.sd_log))


def _upper_mean(prediction: LengthPrediction, log: float) -> float:
    """Mean of ln(tokens) above `log`: mu + sd * pdf(z) / (1 - cdf(z)) of a normal distribution."""
    z = (log - prediction.mean_log) / prediction.sd_log
    return prediction.mean_log + prediction.sd_log * _STANDARD.pdf(z) / _tail(prediction, log)
