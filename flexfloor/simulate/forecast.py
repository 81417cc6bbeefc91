"""What a simulated run expects of its prompts: the real predictor, or a better or worse one. PURE."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from flexfloor.scheduling.calibration import rank_correlation
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.observation import LengthObservation
from flexfloor.scheduling.predict import CORRELATION_STEPS, Predictor
from flexfloor.simulate.traces import Trace


class Knowledge(StrEnum):
    """What predictions rest on."""

    history = "history"
    """The responses of earlier passes, through the predictor."""
    cold = "cold"
    """Nothing: every prompt is expected to be like any other."""
    reversed = "reversed"
    """The predictor's, with the longest taken for the shortest, and trusted all the same."""
    oracle = "oracle"
    """The true length of every response, for batches too."""
    oracle_in_step = "oracle_in_step"
    """The same, but batches are made as with `history`: what is lost after the batch is formed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What a prompt draws in a pass."""

    prompt_index: int
    lengths: tuple[int, ...]


class Forecast:
    """Predictions of one run over a trace, for a pass at a time.

    `noise_sd` is added to every prompt's mean log length, anew in each pass: 1.0 makes a prediction that is
    off by a factor of e in either direction quite usual.
    """

    def __init__(self, trace: Trace, knowledge: Knowledge, *, noise_sd: float = 0.0, seed: int = 0) -> None:
        self._trace = trace
        self._knowledge = knowledge
        self._noise_sd = noise_sd
        self._seed = seed
        self._predictor = Predictor(cap_tokens=trace.cap_tokens)
        self._pass_index = 0
        self._noise = np.zeros(trace.num_prompts)
        self._stand_in = np.arange(trace.num_prompts)
        self._recent: deque[list[tuple[float, float]]] = deque(maxlen=CORRELATION_STEPS)

    def begin_pass(self, pass_index: int) -> None:
        self._pass_index = pass_index
        rng = np.random.default_rng([self._seed, 7, pass_index])
        self._noise = self._noise_sd * rng.standard_normal(self._trace.num_prompts)
        if self._knowledge is Knowledge.reversed:
            expected = [self._by_history(index).expected_tokens for index in range(self._trace.num_prompts)]
            order = np.argsort(expected, kind="stable")
            self._stand_in[order] = order[::-1]

    def of_prompt(self, index: int) -> LengthPrediction:
        if self._knowledge is Knowledge.oracle:
            return _known(float(self._trace.lengths[self._pass_index, index].mean()), self._trace.cap_tokens)
        known = self._by_history(int(self._stand_in[index]))
        return (
            replace(known, mean_log=known.mean_log + float(self._noise[index])) if self._noise_sd else known
        )

    def of_response(self, index: int, num_tokens: int) -> LengthPrediction:
        """Of a response that will have `num_tokens`, which the oracle alone looks at."""
        if self.knows_responses:
            return _known(float(num_tokens), self._trace.cap_tokens)
        return self.of_prompt(index)

    @property
    def knows_responses(self) -> bool:
        return self._knowledge in (Knowledge.oracle, Knowledge.oracle_in_step)

    @property
    def rank_correlation(self) -> float | None:
        """What the run knows about the worth of its predictions."""
        if self._knowledge in (Knowledge.oracle, Knowledge.reversed):
            return 1.0
        if not self._noise_sd:
            return self._predictor.rank_correlation
        pairs = [pair for step in self._recent for pair in step]
        return rank_correlation([first for first, _ in pairs], [second for _, second in pairs])

    def observe(self, rollout_step: int, drawn: Sequence[Drawn]) -> None:
        """A finished step."""
        if self._knowledge in (Knowledge.cold, Knowledge.oracle):
            return
        if self._noise_sd and self._predictor.rank_correlation is not None:
            self._recent.append(
                [
                    (self.of_prompt(one.prompt_index).expected_tokens, sum(one.lengths) / len(one.lengths))
                    for one in drawn
                ]
            )
        self._predictor.observe(self._observations(rollout_step, drawn))

    def _by_history(self, index: int) -> LengthPrediction:
        return self._predictor.predict(self._trace.prompt_ids[index], int(self._trace.prompt_tokens[index]))

    def _observations(self, rollout_step: int, drawn: Sequence[Drawn]) -> list[LengthObservation]:
        cap = self._trace.cap_tokens
        return [
            LengthObservation(
                dataset=self._trace.name,
                prompt_id=self._trace.prompt_ids[one.prompt_index],
                response_id=f"{rollout_step}/{one.prompt_index}/{sample}",
                run_id="simulated",
                rollout_step=rollout_step,
                weight_version=rollout_step,
                pass_index=self._pass_index,
                num_tokens=length,
                prompt_tokens=int(self._trace.prompt_tokens[one.prompt_index]),
                is_truncated=length >= cap,
                cap_tokens=cap,
            )
            for one in drawn
            for sample, length in enumerate(one.lengths)
        ]


def _known(num_tokens: float, cap_tokens: int) -> LengthPrediction:
    return LengthPrediction(
        mean_log=float(np.log(num_tokens)), sd_log=0.0, cap_share=0.0, cap_tokens=cap_tokens
    )
