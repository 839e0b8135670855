"""Policy losses: pure functions of tensors. The denominator is an argument, so accumulation over
microbatches equals one large batch.

Every batch gives one optimizer step, so the gradient is taken at the learner's own weights, and PPO's clipped term
min(r A, clip(r) A), with r = learner / rollout, is r times plain REINFORCE inside a one-sided trust region around the
sampler and nothing outside: a token whose probability has already risen beyond 1 + clip_high is not pushed further up,
one that has fallen below 1 - clip_low not further down (PPO, arXiv 1707.06347, eq. 7). A `Correction` bounds r where
it is a weight. All losses below take this term.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from configs.learner import CorrectionKind
from learner.corrections import MAX_LOG_RATIO, Correction, correction_weights, masked_log_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """`loss` is a scalar to call backward on; `metrics` are sums over this microbatch's loss tokens, to be divided by
    the step's token count: `clip_high` and `clip_low` tokens outside the trust region, `correction_masked` inside it
    with weight 0, `kl_ref_k3` where there is a KL term."""

    loss: Tensor
    metrics: dict[str, float]


def dapo_loss(
    learner_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: int,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    correction: Correction | str = "none",
    ages: Tensor | None = None,
) -> LossOutput:
    """DAPO: minus the token mean of min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). No KL term.

    arXiv 2503.14476, eq. 8, with the batch form of the normaliser: `num_loss_tokens` counts the loss mask
    over every microbatch of the optimizer step. All tensors `[B, T]`; `advantages` may be `[B, 1]`.

    `correction` (a Correction, or the name of one with its default bounds) is the token's weight inside the trust
    region. `ages` are the train steps since the weights that sampled each token: at age 0 learner and sampler hold the
    same weights, r differs from 1 by rounding only, and the trust region leaves such tokens alone (None: all tokens
    are of other weights). Tokens without a gradient stay in the denominator. Raises ValueError for an unknown name.
    """
    token_losses, metrics = _token_losses(
        learner_logprobs,
        rollout_logprobs,
        advantages,
        loss_mask,
        clip_low=clip_low,
        clip_high=clip_high,
        correction=correction,
        ages=ages,
    )
    return LossOutput(loss=token_losses.sum() / max(num_loss_tokens, 1), metrics=metrics)


def grpo_loss(
    learner_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_trajectories: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    correction: Correction | str = "none",
    ages: Tensor | None = None,
) -> LossOutput:
    """GRPO: the clipped objective averaged over each trajectory's tokens, then over trajectories.

    arXiv 2402.03300, eq. 3, without its KL term. A row is a trajectory; `num_trajectories` counts those of
    the whole optimizer step. `correction` and `ages` as in `dapo_loss`.
    """
    token_losses, metrics = _token_losses(
        learner_logprobs,
        rollout_logprobs,
        advantages,
        loss_mask,
        clip_low=clip_low,
        clip_high=clip_high,
        correction=correction,
        ages=ages,
    )
    row_means = token_losses.sum(-1) / loss_mask.sum(-1).clamp(min=1)
    return LossOutput(loss=row_means.sum() / max(num_trajectories, 1), metrics=metrics)


def flow_grpo_loss(
    learner_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_trajectories: int | None = None,
    turn_ids: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    kl_weight: float = 0.001,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    correction: Correction | str = "none",
    ages: Tensor | None = None,
) -> LossOutput:
    """Flow-GRPO: the mean over trajectories of the mean over turns of the mean over a turn's tokens, of the
    clipped objective minus `kl_weight` times the k3 estimate of KL(learner || reference).

    arXiv 2510.05592, eq. 5. A row is a trajectory; `turn_ids` `[B, T]` numbers its turns from 0 (ignored
    outside the loss mask); without it a row is one turn. `num_trajectories` counts those of the whole
    optimizer step (default: the rows given). Without `ref_logprobs` there is no KL term. `correction` and `ages` as in
    `dapo_loss`; the KL term is not weighted by them.
    """
    token_losses, metrics = _token_losses(
        learner_logprobs,
        rollout_logprobs,
        advantages,
        loss_mask,
        clip_low=clip_low,
        clip_high=clip_high,
        correction=correction,
        ages=ages,
    )
    if ref_logprobs is not None:
        k3 = _k3(masked_log_ratio(ref_logprobs, learner_logprobs, loss_mask.bool()))
        token_losses = token_losses + kl_weight * k3
        metrics["kl_ref_k3"] = float(k3.detach().sum())
    count = loss_mask.shape[0] if num_trajectories is None else num_trajectories
    loss = (token_losses * _turn_weights(loss_mask, turn_ids)).sum() / max(count, 1)
    return LossOutput(loss=loss, metrics=metrics)


def k3_divergence(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(ref - logp) - (ref - logp) - 1 per token: non-negative, an unbiased estimate of KL(p || ref)."""
    return _k3((ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def _k3(log_ratio: Tensor) -> Tensor:
    return log_ratio.exp() - log_ratio - 1


def _token_losses(
    learner_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    correction: Correction | str,
    ages: Tensor | None,
) -> tuple[Tensor, dict[str, float]]:
    """Loss per token, zero outside the mask, and metric sums. Works in float32 or better."""
    mask = loss_mask.bool()
    chosen = correction if isinstance(correction, Correction) else Correction(kind=cast(CorrectionKind, correction))
    with torch.no_grad():
        log_ratio = masked_log_ratio(learner_logprobs, rollout_logprobs, mask)
        ratio = log_ratio.exp()
        bound = ratio.clamp(1 - clip_low, 1 + clip_high)
        older = mask if ages is None else mask & (ages > 0)
        too_high = older & (ratio > bound) & (advantages > 0)
        too_low = older & (ratio < bound) & (advantages < 0)
        clipped = too_high | too_low
        weights = correction_weights(chosen, log_ratio, mask)
    # 1 in value; carries the gradient of the log-prob.
    unit = masked_log_ratio(learner_logprobs, learner_logprobs.detach(), mask).exp()
    losses = torch.where(mask, -advantages * torch.where(clipped, bound, weights * unit), 0.0)
    return losses, {
        "clip_high": float(too_high.sum()),
        "clip_low": float(too_low.sum()),
        "correction_masked": float((mask & ~clipped & (weights == 0)).sum()),
    }


def _turn_weights(loss_mask: Tensor, turn_ids: Tensor | None) -> Tensor:
    """1 / (number of turns in the row) / (tokens of the token's turn) at trained tokens, 0 elsewhere."""
    mask = loss_mask.bool()
    ids = torch.zeros_like(mask, dtype=torch.long) if turn_ids is None else turn_ids.long().clamp(min=0)
    lengths = torch.zeros(mask.shape[0], int(ids.max()) + 1 if ids.numel() else 1, device=mask.device)
    lengths.scatter_add_(1, ids, mask.to(lengths.dtype))
    num_turns = (lengths > 0).sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask, 1.0 / (num_turns * lengths.gather(1, ids).clamp(min=1)), 0.0)
