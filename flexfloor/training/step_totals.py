"""Adds up the loss sums of a training step's microbatches, for `TrainStats`. Tensor code only."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flexfloor.training.loss import LossSums
from flexfloor.training.messages import TrainStats


class StepTotals:
    """One rank's sums. Sum `as_tensor()` over the ranks and give the result to `stats()`."""

    def __init__(self) -> None:
        self.num_optimizer_steps = 0
        self._grad_norms: list[float] = []
        # loss, tokens, clipped, importance clipped, -logprob, kl, |old - rollout|, tokens of the latter
        self._sums = torch.zeros(8, dtype=torch.float64)

    def add(self, microbatches: Sequence[LossSums], grad_norm: float, *, knows_old: bool) -> None:
        """One optimizer step.

        Args:
            microbatches: this rank's sums; empty where another rank reports them.
            knows_old: whether |old - rollout| was measured with the weights at the step's start.
        """
        self.num_optimizer_steps += 1
        self._grad_norms.append(grad_norm)
        for sums in microbatches:
            self._sums += _as_tensor(sums)
            if not knows_old:
                self._sums[6:] -= _as_tensor(sums)[6:]

    def as_tensor(self) -> Tensor:
        """# [8], on the CPU"""
        return self._sums.clone()

    def stats(
        self, summed: Tensor, *, learning_rate: float, seconds: float, logprob_seconds: float
    ) -> TrainStats:
        loss, tokens, clipped, capped, neg_logprob, kl, diff, known = summed.tolist()
        num_tokens = max(tokens, 1.0)
        return TrainStats(
            loss=loss / self.num_optimizer_steps,
            grad_norm=sum(self._grad_norms) / self.num_optimizer_steps,
            clip_fraction=clipped / num_tokens,
            importance_clip_fraction=capped / num_tokens,
            entropy=neg_logprob / num_tokens,
            kl=kl / num_tokens,
            mean_abs_logprob_diff=diff / max(known, 1.0),
            num_tokens=round(tokens),
            num_optimizer_steps=self.num_optimizer_steps,
            learning_rate=learning_rate,
            seconds=seconds,
            logprob_seconds=logprob_seconds,
        )


def _as_tensor(sums: LossSums) -> Tensor:
    parts = [
        sums.loss,
        sums.num_tokens,
        sums.num_clipped,
        sums.num_importance_clipped,
        sums.negative_logprob,
        sums.kl,
        sums.abs_logprob_diff,
        sums.num_tokens,
    ]
    return torch.stack([part.detach().double() for part in parts]).cpu()
