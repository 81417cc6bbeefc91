import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flexfloor.config.schema import LossAgg
from flexfloor.training.loss import (
    LossSums,
    TokenBatch,
    grpo_loss,
    importance_weights,
    k3_kl,
    nll_loss,
    token_weights,
)

OPTIONS = {"clip_low": 0.2, "clip_high": 0.28, "importance_cap": None, "kl_coef": 0.0}


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch_of(old: Tensor, advantages: Tensor, **fields: Tensor) -> TokenBatch:
    """Weights of one, and a rollout that agrees with the trainer, unless `fields` say otherwise."""
    batch = TokenBatch(
        weights=torch.ones_like(old), advantages=advantages, old_logprobs=old, rollout_logprobs=old
    )
    return replace(batch, **fields)


def random_batch(num_tokens: int) -> tuple[Tensor, TokenBatch]:
    generator = torch.Generator().manual_seed(3)

    def draw() -> Tensor:
        return torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    logprobs = -draw().abs()
    batch = TokenBatch(
        weights=draw().abs(),
        advantages=draw(),
        old_logprobs=logprobs + 0.4 * draw(),
        rollout_logprobs=logprobs + 0.4 * draw(),
        reference_logprobs=logprobs + 0.4 * draw(),
    )
    return logprobs, batch


def test_weights_by_hand() -> None:
    assert token_weights([1, 4], LossAgg.sequence_mean, 8) == [1 / 2, 1 / 8]
    assert token_weights([1, 4], LossAgg.fixed, 8) == [1 / 16, 1 / 16]
    assert token_weights([1, 4], LossAgg.token_mean, 8) == [1 / 5, 1 / 5]
    with pytest.raises(ValueError, match="at least one"):
        token_weights([2, 0], LossAgg.token_mean, 8)


def test_which_lengths_share_a_step_matters_to_the_token_mean_only() -> None:
    """What length-bucketed batching relies on, and why it refuses the third."""
    for loss_agg, depends in (
        (LossAgg.sequence_mean, False),
        (LossAgg.fixed, False),
        (LossAgg.token_mean, True),
    ):
        among_short = token_weights([4, 1, 1], loss_agg, 8)[0]
        among_long = token_weights([4, 8, 8], loss_agg, 8)[0]
        assert (among_short != among_long) is depends


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "has_gradient"),
    [
        (1.0, 2.0, -2.0, True),
        (1.5, 2.0, -2.0 * 1.28, False),  # clipped above
        (1.5, -2.0, 3.0, True),  # never clipped where it would help
        (0.5, 2.0, -1.0, True),
        (0.5, -2.0, 2.0 * 0.8, False),  # clipped below
        (1.27, 1.0, -1.27, True),  # inside the upper range, outside the lower one's width
    ],
)
def test_clipped_surrogate_by_hand(
    ratio: float, advantage: float, expected: float, has_gradient: bool
) -> None:
    old = column(-1.3)
    logprobs = (old + math.log(ratio)).requires_grad_()
    sums = grpo_loss(logprobs, batch_of(old, column(advantage)), **OPTIONS)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(expected)
    assert sums.num_clipped.item() == (not has_gradient)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(expected if has_gradient else 0.0)


def test_importance_weight_multiplies_and_is_capped() -> None:
    rollout = column(-1.0, -1.0, -1.0)
    old = rollout + column(math.log(0.5), math.log(1.9), math.log(7.0))
    assert importance_weights(old, rollout, 2.0).tolist() == pytest.approx([0.5, 1.9, 2.0])
    batch = batch_of(old, column(1.0, 1.0, 1.0), rollout_logprobs=rollout)
    sums = grpo_loss(old.clone(), batch, **{**OPTIONS, "importance_cap": 2.0})
    assert sums.loss.item() == pytest.approx(-(0.5 + 1.9 + 2.0))
    assert sums.num_importance_clipped.item() == 1
    assert sums.abs_logprob_diff.item() == pytest.approx(math.log(2.0) + math.log(1.9) + math.log(7.0))
    assert grpo_loss(old.clone(), batch, **OPTIONS).loss.item() == pytest.approx(-3.0)


def test_k3_by_hand_and_its_penalty() -> None:
    current, reference = column(-1.0, -2.0), column(-1.5, -2.0)
    assert k3_kl(current, reference).tolist() == pytest.approx([math.exp(-0.5) + 0.5 - 1.0, 0.0])
    batch = batch_of(current, column(0.0, 0.0), reference_logprobs=reference)
    sums = grpo_loss(current, batch, **{**OPTIONS, "kl_coef": 0.1})
    assert sums.loss.item() == pytest.approx(0.1 * (math.exp(-0.5) - 0.5))
    assert sums.kl.item() == pytest.approx(math.exp(-0.5) - 0.5)


def test_k3_estimates_the_divergence() -> None:
    """Over many tokens drawn from p, the mean of k3 is KL(p || q)."""
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.1, 0.4])
    tokens = torch.multinomial(p, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    exact = float((p * (p / q).log()).sum())
    assert float(k3_kl(p.log()[tokens], q.log()[tokens]).mean()) == pytest.approx(exact, rel=0.02)


def test_gradient_equals_finite_differences() -> None:
    logprobs, batch = random_batch(24)
    options = {"clip_low": 0.2, "clip_high": 0.28, "importance_cap": 1.3, "kl_coef": 0.05}
    leaf = logprobs.clone().requires_grad_()
    grpo_loss(leaf, batch, **options).loss.backward()
    step = 1e-6
    for index in range(len(logprobs)):
        shift = torch.zeros_like(logprobs)
        shift[index] = step
        up, down = (grpo_loss(logprobs + sign * shift, batch, **options).loss for sign in (1, -1))
        assert leaf.grad is not None
        assert leaf.grad[index].item() == pytest.approx(((up - down) / (2 * step)).item(), abs=1e-7)


def part_of(batch: TokenBatch, chosen: Tensor) -> TokenBatch:
    names = ("weights", "advantages", "old_logprobs", "rollout_logprobs", "reference_logprobs")
    return replace(batch, **{name: getattr(batch, name)[chosen] for name in names})


def test_sums_do_not_depend_on_split_or_order() -> None:
    logprobs, batch = random_batch(30)
    options = {"clip_low": 0.2, "clip_high": 0.28, "importance_cap": 1.3, "kl_coef": 0.05}
    whole = grpo_loss(logprobs, batch, **options)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    parts = [
        grpo_loss(logprobs[chosen], part_of(batch, chosen), **options)
        for chosen in order.split([1, 17, 5, 7])
    ]
    for name in LossSums.__dataclass_fields__:
        total = sum(getattr(part, name).item() for part in parts)
        assert total == pytest.approx(getattr(whole, name).item(), abs=1e-9), name


def test_nll_by_hand() -> None:
    logprobs = column(-1.0, -3.0).requires_grad_()
    sums = nll_loss(logprobs, column(0.5, 0.5))
    sums.loss.backward()
    assert sums.loss.item() == 2.0
    assert sums.negative_logprob.item() == 4.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, -0.5]
