"""Loss of a rollout step's response tokens. Tensor code only: no process groups, no device choice.

Every tensor is one-dimensional over response tokens, `# [num_tokens]`, in whatever order and split: a token's
weight is fixed beforehand for the whole optimizer step (`token_weights`), so the sum of the losses of all
microbatches on all ranks is the loss, and packing cannot change it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexfloor.config.schema import LossAgg

# exp() of a larger difference is useless as a ratio and overflows float32 from 88 on.
MAX_LOG_RATIO = 20.0


def token_weights(lengths: Sequence[int], loss_agg: LossAgg, max_response_tokens: int) -> list[float]:
    """Weight of each token of each response: `sum(weight * token loss)` over the step is its loss.

    Args:
        lengths: response tokens of every response of the optimizer step, over all ranks.
        max_response_tokens: the cap, read by `LossAgg.fixed` only (Dr. GRPO, arXiv:2503.20783).

    Raises:
        ValueError: no responses, or one without tokens.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError("token weights need at least one response, each with at least one token")
    if loss_agg is LossAgg.sequence_mean:
        return [1.0 / (len(lengths) * length) for length in lengths]
    if loss_agg is LossAgg.fixed:
        return [1.0 / (len(lengths) * max_response_tokens)] * len(lengths)
    return [1.0 / sum(lengths)] * len(lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """What the loss needs of each response token beside its current logprob. All `# [num_tokens]` float32."""

    weights: Tensor
    advantages: Tensor
    old_logprobs: Tensor
    """Under the weights at the start of the rollout step's training; no gradient."""
    rollout_logprobs: Tensor
    reference_logprobs: Tensor | None = None
    """Under the reference model; needed when `kl_coef` is not 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums over the tokens of one microbatch; they add up over microbatches and ranks.

    All are zero-dimensional and carry no gradient, but for `loss`.
    """

    loss: Tensor
    num_tokens: Tensor
    num_clipped: Tensor
    """Tokens whose gradient the surrogate's clip removed."""
    num_importance_clipped: Tensor
    """Tokens whose importance weight reached the cap."""
    negative_logprob: Tensor
    """Divided by num_tokens: Monte-Carlo estimate of the policy's entropy, nats per token."""
    kl: Tensor
    """k3 estimate of KL(current || reference); without a reference of KL(old || current). Nats."""
    abs_logprob_diff: Tensor
    """|old - rollout|: how far the trainer's logprobs are from the rollout engine's."""


def k3_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(p || reference) for tokens drawn from p, never negative: exp(d) - d - 1 with
    d = reference - p (k3 of Schulman, "Approximating KL Divergence", 2020; GRPO eq. 4).  # [num_tokens]
    """
    diff = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(diff) - diff


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """min(exp(old - rollout), cap): truncated importance sampling (Ionides 2008) between the engine that drew
    the tokens and the trainer's own view of the same weights.  # [num_tokens]
    """
    return (old_logprobs - rollout_logprobs).clamp(max=MAX_LOG_RATIO).exp().clamp(max=cap)


def grpo_loss(
    logprobs: Tensor,
    batch: TokenBatch,
    *,
    clip_low: float,
    clip_high: float,
    importance_cap: float | None,
    kl_coef: float,
) -> LossSums:
    """Clipped surrogate (PPO, arXiv:1707.06347, eq. 7) with the two clip ranges of DAPO (arXiv:2503.14476).

    Per token: -w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * k3, with
    r = exp(current - old) and w the truncated importance weight (1 when `importance_cap` is None).

    Args:
        logprobs: current logprobs with gradient.  # [num_tokens]
    """
    ratio = (logprobs - batch.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    importance = torch.ones_like(batch.weights)
    if importance_cap is not None:
        importance = importance_weights(batch.old_logprobs, batch.rollout_logprobs, importance_cap)
    token_loss = -importance * surrogate
    if batch.reference_logprobs is None:
        assert not kl_coef, "a KL penalty needs reference logprobs"
        kl = k3_kl(batch.old_logprobs, logprobs.detach())
    else:
        kl = k3_kl(logprobs, batch.reference_logprobs)
        token_loss = token_loss + kl_coef * kl
    is_capped = importance >= importance_cap if importance_cap is not None else importance < 0
    return LossSums(
        loss=(batch.weights * token_loss).sum(),
        num_tokens=torch.ones_like(batch.weights).sum(),
        num_clipped=(clipped * batch.advantages < ratio * batch.advantages).detach().float().sum(),
        num_importance_clipped=is_capped.float().sum(),
        negative_logprob=-logprobs.detach().sum(),
        kl=kl.detach().sum(),
        abs_logprob_diff=(batch.old_logprobs - batch.rollout_logprobs).abs().sum(),
    )


def nll_loss(logprobs: Tensor, weights: Tensor) -> LossSums:
    """Negative log-likelihood of demonstrations, for the supervised warm-up.

    Args:
        logprobs: current logprobs with gradient.  # [num_tokens]
        weights: as `token_weights` gives them.  # [num_tokens]
    """
    zero = logprobs.new_zeros(())
    return LossSums(
        loss=-(weights * logprobs).sum(),
        num_tokens=torch.ones_like(weights).sum(),
        num_clipped=zero,
        num_importance_clipped=zero,
        negative_logprob=-logprobs.detach().sum(),
        kl=zero,
        abs_logprob_diff=zero,
    )
