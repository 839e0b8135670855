"""Policy losses: pure functions of tensors. The denominator is an argument, so accumulation over
microbatches equals one large batch."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from configs.learner import CorrectionKind
from learner.corrections import Correction, correction_weights, masked_log_ratio

MAX_REFERENCE_K3 = 10.0
"""Nats. One token that the learner finds far less likely than the reference does would outweigh a whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """`loss` is a scalar to call backward on; `weights` `[B, T]` are the correction's, 0 outside the loss mask;
    `metrics` are sums over this microbatch's loss tokens, to be divided by the step's token count."""

    loss: Tensor
    weights: Tensor
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
    correction: Correction | str | None = None,
) -> LossOutput:
    """DAPO: minus the token mean of min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). No KL term.

    arXiv 2503.14476, eq. 8, with the batch form of the normaliser: `num_loss_tokens` counts the loss mask
    over every microbatch of the optimizer step. All tensors `[B, T]`; `advantages` may be `[B, 1]`.

    `correction` (a Correction, or the name of one with its default bounds) says what r is, and the detached weight w
    that multiplies each token; the clip is on r only, and rejected tokens stay in the denominator:

    | correction | r | w |
    | --- | --- | --- |
    | "bypass", or None without `proximal_logprobs` | learner / rollout | 1 |
    | "none" | learner / proximal, or as "bypass" without | 1 |
    | None with `proximal_logprobs` | as "decoupled" | |
    | any other | learner / proximal | by its kind, of proximal / rollout |

    Any other kind without `proximal_logprobs` takes the detached learner log-probs for them: with one optimizer step
    per batch the proximal policy is the learner itself (A-3PO, arXiv 2512.06547), r is 1 and the loss is w times plain
    REINFORCE. Raises ValueError for an unknown name.
    """
    token_losses, weights, metrics = _clipped_token_losses(
        learner_logprobs,
        rollout_logprobs,
        advantages,
        loss_mask,
        clip_low=clip_low,
        clip_high=clip_high,
        proximal_logprobs=proximal_logprobs,
        correction=correction,
    )
    return LossOutput(loss=token_losses.sum() / max(num_loss_tokens, 1), weights=weights, metrics=metrics)


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
    correction: Correction | str | None = None,
) -> LossOutput:
    """GRPO: the clipped objective averaged over each trajectory's tokens, then over trajectories.

    arXiv 2402.03300, eq. 3, without its KL term. A row is a trajectory; `num_trajectories` counts those of
    the whole optimizer step. `proximal_logprobs` and `correction` as in `dapo_loss`.
    """
    token_losses, weights, metrics = _clipped_token_losses(
        learner_logprobs,
        rollout_logprobs,
        advantages,
        loss_mask,
        clip_low=clip_low,
        clip_high=clip_high,
        proximal_logprobs=proximal_logprobs,
        correction=correction,
    )
    row_means = token_losses.sum(-1) / loss_mask.sum(-1).clamp(min=1)
    return LossOutput(loss=row_means.sum() / max(num_trajectories, 1), weights=weights, metrics=metrics)


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
    correction: Correction | str | None = None,
) -> LossOutput:
    """Flow-GRPO: the mean over trajectories of the mean over turns of the mean over a turn's tokens, of the
    clipped objective minus `kl_weight` times `reference_k3`.

    arXiv 2510.05592, eq. 5. A row is a trajectory; `turn_ids` `[B, T]` numbers its turns from 0 (ignored
    outside the loss mask); without it a row is one turn. `num_trajectories` counts those of the whole
    optimizer step (default: the rows given). Without `ref_logprobs` there is no KL term. `proximal_logprobs` and
    `correction` as in `dapo_loss`; the KL term is not weighted by them.
    """
    token_losses, weights, metrics = _clipped_token_losses(
        learner_logprobs,
        rollout_logprobs,
        advantages,
        loss_mask,
        clip_low=clip_low,
        clip_high=clip_high,
        proximal_logprobs=proximal_logprobs,
        correction=correction,
    )
    if ref_logprobs is not None:
        k3 = reference_k3(learner_logprobs, ref_logprobs, loss_mask)
        token_losses = token_losses + kl_weight * k3
        metrics["kl_ref_k3"] = float(k3.detach().sum())
    count = loss_mask.shape[0] if num_trajectories is None else num_trajectories
    loss = (token_losses * _turn_weights(loss_mask, turn_ids)).sum() / max(count, 1)
    return LossOutput(loss=loss, weights=weights, metrics=metrics)


def reference_k3(learner_logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = ref - learner log-prob at the tokens of the mask, 0 elsewhere, all `[B, T]`; at most
    `MAX_REFERENCE_K3`, beyond which a token gives no gradient.

    Over tokens that the learner samples its mean is KL(learner || ref). As a loss, which takes the tokens as given, its
    mean gradient is that of the other direction, KL(ref || learner).
    """
    return _k3(masked_log_ratio(ref_logprobs, learner_logprobs, loss_mask.bool())).clamp(max=MAX_REFERENCE_K3)


def _k3(log_ratio: Tensor) -> Tensor:
    return log_ratio.exp() - log_ratio - 1


def _clipped_token_losses(
    learner_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    proximal_logprobs: Tensor | None,
    correction: Correction | str | None,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss per token and weights, both zero outside the mask, and metric sums. Works in float32 or better."""
    mask = loss_mask.bool()
    chosen = _chosen(correction, proximal_logprobs)
    old = _old_logprobs(chosen, learner_logprobs, rollout_logprobs, proximal_logprobs)
    ratio = masked_log_ratio(learner_logprobs, old, mask).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    weights, metrics = correction_weights(chosen, old, rollout_logprobs, advantages, mask)
    losses = torch.where(mask, -torch.minimum(ratio * advantages, clipped * advantages) * weights, 0.0)
    with torch.no_grad():
        gap = masked_log_ratio(learner_logprobs, rollout_logprobs, mask)
        metrics |= {
            "clip_high": float((mask & (ratio > 1 + clip_high) & (advantages > 0)).sum()),
            "clip_low": float((mask & (ratio < 1 - clip_low) & (advantages < 0)).sum()),
            "ratio": float(torch.where(mask, ratio, 0.0).sum()),
            "logprob_gap_abs": float(gap.abs().sum()),
            "mismatch_k3": float(_k3(gap).sum()),
        }
    return losses, weights, metrics


def _chosen(correction: Correction | str | None, proximal_logprobs: Tensor | None) -> Correction:
    if isinstance(correction, Correction):
        return correction
    if correction is None:
        correction = "bypass" if proximal_logprobs is None else "decoupled"
    return Correction(kind=cast(CorrectionKind, correction))  # which refuses an unknown name


def _old_logprobs(correction: Correction, learner: Tensor, rollout: Tensor, proximal: Tensor | None) -> Tensor:
    """The log-probs that the clipped ratio is taken against."""
    if correction.kind == "bypass":
        return rollout
    if proximal is not None:
        return proximal.detach()
    return rollout if correction.kind == "none" else learner.detach()


def _turn_weights(loss_mask: Tensor, turn_ids: Tensor | None) -> Tensor:
    """1 / (number of turns in the row) / (tokens of the token's turn) at trained tokens, 0 elsewhere."""
    mask = loss_mask.bool()
    ids = torch.zeros_like(mask, dtype=torch.long) if turn_ids is None else turn_ids.long().clamp(min=0)
    lengths = torch.zeros(mask.shape[0], int(ids.max()) + 1 if ids.numel() else 1, device=mask.device)
    lengths.scatter_add_(1, ids, mask.to(lengths.dtype))
    num_turns = (lengths > 0).sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask, 1.0 / (num_turns * lengths.gather(1, ids).clamp(min=1)), 0.0)
