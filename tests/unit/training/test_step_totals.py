import pytest
import torch

from flexfloor.training.loss import LossSums
from flexfloor.training.step_totals import StepTotals


def sums(loss: float, num_tokens: float, diff: float) -> LossSums:
    values = {
        "loss": loss,
        "num_tokens": num_tokens,
        "num_clipped": 1.0,
        "num_importance_clipped": 2.0,
        "negative_logprob": 3.0 * num_tokens,
        "kl": 0.5 * num_tokens,
        "abs_logprob_diff": diff,
    }
    return LossSums(**{name: torch.tensor(value) for name, value in values.items()})


def test_means_over_two_ranks_and_two_optimizer_steps() -> None:
    """Losses add up within an optimizer step; what was not known of the old weights does not count."""
    ranks = [StepTotals(), StepTotals()]
    for totals, share in zip(ranks, (1.0, 3.0), strict=True):
        totals.add([sums(0.25 * share, 4 * share, diff=2.0 * share)], grad_norm=1.0, knows_old=True)
        totals.add([sums(0.5 * share, 6 * share, diff=99.0)], grad_norm=3.0, knows_old=False)
    stats = ranks[0].stats(
        sum(r.as_tensor() for r in ranks), learning_rate=1e-4, seconds=2.0, logprob_seconds=0.5
    )
    assert stats.loss == pytest.approx((0.25 * 4 + 0.5 * 4) / 2)
    assert stats.grad_norm == 2.0
    assert stats.num_tokens == 40
    assert stats.num_optimizer_steps == 2
    assert stats.clip_fraction == pytest.approx(4 / 40)
    assert stats.importance_clip_fraction == pytest.approx(8 / 40)
    assert stats.entropy == pytest.approx(3.0)
    assert stats.kl == pytest.approx(0.5)
    assert stats.mean_abs_logprob_diff == pytest.approx(8.0 / 16)


def test_a_rank_that_sees_no_losses_adds_nothing() -> None:
    totals = StepTotals()
    totals.add([], grad_norm=1.0, knows_old=True)
    assert totals.as_tensor().tolist() == [0.0] * 8
