"""Lengths drawn from a known model, for tests of what is learnt from them."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from flexfloor.scheduling.observation import LengthObservation


def observe(
    prompt_id: str,
    lengths: Sequence[int],
    *,
    step: int = 0,
    pass_index: int = 0,
    run_id: str = "run",
    dataset: str = "math",
    cap: int = 16_384,
    prompt_tokens: int = 0,
) -> list[LengthObservation]:
    """One prompt's responses in one step; those at the cap are truncated."""
    return [
        LengthObservation(
            dataset=dataset,
            prompt_id=prompt_id,
            response_id=f"{step}/{prompt_id}/{index}",
            run_id=run_id,
            rollout_step=step,
            weight_version=step,
            pass_index=pass_index,
            num_tokens=length,
            prompt_tokens=prompt_tokens,
            is_truncated=length >= cap,
            cap_tokens=cap,
        )
        for index, length in enumerate(lengths)
    ]


class World:
    """Prompts of lognormal lengths; `shares` of sigma squared lie between prompts, passes and responses."""

    def __init__(
        self,
        *,
        seed: int,
        num_prompts: int = 256,
        shares: tuple[float, float, float] = (0.55, 0.08, 0.37),
        sigma: float = 0.9,
        median: float = 1800,
        cap: int = 16_384,
        runaway_share: float = 0.0,
        drift_per_step: float = 0.0,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        between, passes, within = (share * sigma**2 for share in shares)
        self.num_prompts, self.cap = num_prompts, cap
        self.prompt_means = math.log(median) + self._rng.normal(0, math.sqrt(between), num_prompts)
        self._pass_sd, self._within_sd = math.sqrt(passes), math.sqrt(within)
        self._runaway_share, self._drift_per_step = runaway_share, drift_per_step
        self._pass_means = np.zeros(num_prompts)
        self.step = 0

    def begin_pass(self) -> list[int]:
        self._pass_means = self._rng.normal(0, self._pass_sd, self.num_prompts)
        return [int(index) for index in self._rng.permutation(self.num_prompts)]

    def lengths(self, prompt: int, num: int) -> list[int]:
        mean = self.prompt_means[prompt] + self._pass_means[prompt] + self._drift_per_step * self.step
        drawn = np.minimum(self.cap, np.exp(self._rng.normal(mean, self._within_sd, num)) + 1).astype(int)
        drawn[self._rng.random(num) < self._runaway_share] = self.cap
        return [int(length) for length in drawn]

    def run_step(self, prompts: Sequence[int], pass_index: int, num: int = 8) -> list[LengthObservation]:
        step = [
            one
            for prompt in prompts
            for one in observe(
                str(prompt),
                self.lengths(prompt, num),
                step=self.step,
                pass_index=pass_index,
                cap=self.cap,
            )
        ]
        self.step += 1
        return step

    def run_pass(self, pass_index: int, batch: int = 32) -> Iterator[list[LengthObservation]]:
        order = self.begin_pass()
        for start in range(0, len(order), batch):
            yield self.run_step(order[start : start + batch], pass_index)
