"""Policy losses: pure functions of tensors. The denominator is an argument, so accumulation over
microbatches equals one large batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """`loss` is a scalar to call backward on; `metrics` are sums over this microbatch's loss tokens, to be
    divided by the step's token count."""

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
    proximal_logprobs: Tensor | None = None,
    max_importance_weight: float | None = None,
) -> LossOutput:
    """DAPO: minus the token mean of min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). No KL term.

    arXiv 2503.14476, eq. 8, with the batch form of the normaliser: `num_loss_tokens` counts the loss mask
    over every microbatch of the optimizer step. All tensors `[B, T]`; `advantages` may be `[B, 1]`.

    Without `proximal_logprobs` the ratio r is learner / rollout (on-policy, or the bypass form). With them
    it is decoupled PPO (arXiv 2110.00641): r is learner / proximal, and each token is multiplied by the
    detached importance weight proximal / rollout, truncated at `max_importance_weight`.
    """
    token_losses, metrics = _clipped_token_losses(
        learner_logprobs,
        rollout_logprobs,
        advantages,
        loss_mask,
        clip_low=clip_low,
        clip_high=clip_high,
        proximal_logprobs=proximal_logprobs,
        max_importance_weight=max_importance_weight,
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
    proximal_logprobs: Tensor | None = None,
    max_importance_weight: float | None = None,
) -> LossOutput:
    """GRPO: the clipped objective averaged over each trajectory's tokens, then over trajectories.

    arXiv 2402.03300, eq. 3, without its KL term. A row is a trajectory; `num_trajectories` counts those of
    the whole optimizer step.
    """
    token_losses, metrics = _clipped_token_losses(
        learner_logprobs,
        rollout_logprobs,
        advantages,
        loss_mask,
        clip_low=clip_low,
        clip_high=clip_high,
        proximal_logprobs=proximal_logprobs,
        max_importance_weight=max_importance_weight,
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
    proximal_logprobs: Tensor | None = None,
    max_importance_weight: float | None = None,
) -> LossOutput:
    """Flow-GRPO: the mean over trajectories of the mean over turns of the mean over a turn's tokens, of the
    clipped objective minus `kl_weight` times the k3 estimate of KL(learner || reference).

    arXiv 2510.05592, eq. 5. A row is a trajectory; `turn_ids` `[B, T]` numbers its turns from 0 (ignored
    outside the loss mask); without it a row is one turn. `num_trajectories` counts those of the whole
    optimizer step (default: the rows given). Without `ref_logprobs` there is no KL term. `proximal_logprobs` and
    `max_importance_weight` as in `dapo_loss`; the KL term is not weighted by them.
    """
    token_losses, metrics = _clipped_token_losses(
        learner_logprobs,
        rollout_logprobs,
        advantages,
        loss_mask,
        clip_low=clip_low,
        clip_high=clip_high,
        proximal_logprobs=proximal_logprobs,
        max_importance_weight=max_importance_weight,
    )
    if ref_logprobs is not None:
        # As above: outside the mask a log-prob may be anything, and 0 times nan is nan.
        k3 = k3_divergence(
            torch.where(loss_mask.bool(), learner_logprobs, 0.0), ref_logprobs.where(loss_mask.bool(), 0.0)
        )
        token_losses = token_losses + kl_weight * k3
        metrics["kl_ref_k3"] = float(k3.detach().sum())
    weights = _turn_weights(loss_mask, turn_ids)
    count = loss_mask.shape[0] if num_trajectories is None else num_trajectories
    return LossOutput(loss=(token_losses * weights).sum() / max(count, 1), metrics=metrics)


def k3_divergence(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(ref - logp) - (ref - logp) - 1 per token: non-negative, an unbiased estimate of KL(p || ref)."""
    difference = (ref_logprobs - logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return difference.exp() - difference - 1


def _clipped_token_losses(
    learner_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    proximal_logprobs: Tensor | None = None,
    max_importance_weight: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Loss per token, zero outside the mask, and metric sums. Works in float32 or better."""
    mask = loss_mask.bool()
    learner = learner_logprobs if learner_logprobs.dtype == torch.float64 else learner_logprobs.float()
    old = rollout_logprobs if proximal_logprobs is None else proximal_logprobs
    # Outside the mask a log-prob may be anything, -inf included; it must reach neither loss nor gradient.
    log_ratio = torch.where(mask, learner - old, 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    losses = -torch.minimum(unclipped, clipped)
    weight = _importance_weights(mask, proximal_logprobs, rollout_logprobs, max_importance_weight)
    losses = torch.where(mask, losses * weight, 0.0)
    with torch.no_grad():
        gap = torch.where(mask, learner - rollout_logprobs, 0.0)
        metrics = {
            "clip_high": float((mask & (ratio > 1 + clip_high) & (advantages > 0)).sum()),
            "clip_low": float((mask & (ratio < 1 - clip_low) & (advantages < 0)).sum()),
            "ratio": float(torch.where(mask, ratio, 0.0).sum()),
            "logprob_gap_abs": float(gap.abs().sum()),
            "mismatch_k3": float((k3_divergence(rollout_logprobs, learner) * mask).nan_to_num().sum()),
            "weight": float(torch.where(mask, weight, 0.0).sum()),
            "weight_squared": float(torch.where(mask, weight**2, 0.0).sum()),
        }
    return losses, metrics


def _importance_weights(mask: Tensor, proximal: Tensor | None, rollout: Tensor, max_weight: float | None) -> Tensor:
    """Detached proximal / rollout, truncated above; ones where there is no proximal policy."""
    if proximal is None:
        return torch.ones_like(rollout)
    log_weight = torch.where(mask, proximal - rollout, 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    weight = log_weight.exp().detach()
    return weight if max_weight is None else weight.clamp(max=max_weight)


def _turn_weights(loss_mask: Tensor, turn_ids: Tensor | None) -> Tensor:
    """1 / (number of turns in the row) / (tokens of the token's turn) at trained tokens, 0 elsewhere."""
    mask = loss_mask.bool()
    ids = torch.zeros_like(mask, dtype=torch.long) if turn_ids is None else turn_ids.long().clamp(min=0)
    lengths = torch.zeros(mask.shape[0], int(ids.max()) + 1 if ids.numel() else 1, device=mask.device)
    lengths.scatter_add_(1, ids, mask.to(lengths.dtype))
    num_turns = (lengths > 0).sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask, 1.0 / (num_turns * lengths.gather(1, ids).clamp(min=1)), 0.0)
