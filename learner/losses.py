"""Policy losses: pure functions of tensors. Denominators are inputs, so accumulation over
microbatches equals one large batch.

Every batch gives one optimizer step, so the gradient is taken at the learner's own weights, and PPO's clipped term
min(r A, clip(r) A), with r = learner / rollout, is r times plain REINFORCE inside a one-sided trust region around the
sampler and nothing outside: a token whose probability has already risen beyond 1 + clip_high is not pushed further up,
one that has fallen below 1 - clip_low not further down (PPO, arXiv 1707.06347, eq. 7). A correction bounds r where
it is a weight. `gspo` takes this term with one r for a whole trajectory; `cispo` only bounds r, without a trust region.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from configs.learner import (
    CispoConfig,
    CorrectionConfig,
    CustomLossConfig,
    DapoConfig,
    DrGrpoConfig,
    FlowGrpoConfig,
    GrpoConfig,
    GspoConfig,
    LossConfig,
)
from configs.plugins import OwnCodeError, failure
from learner.corrections import correction_weights, masked_log_ratio

MAX_REFERENCE_K3 = 10.0
"""Nats. One token that the learner finds far less likely than the reference does would outweigh a whole batch."""


METRICS = ("clip_high", "clip_low", "correction_masked", "kl_ref_k3")
"""The metrics of a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """`loss` is a scalar to call backward on; `metrics` are sums over this microbatch's loss tokens, to be divided by
    the step's token count: `clip_high` and `clip_low` tokens outside the trust region, `correction_masked` inside it
    with weight 0, `kl_ref_k3` where there is a KL term."""

    loss: Tensor
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One microbatch of an optimizer step. A row is a trajectory; all tensors are `[B, T]`.

    `learner_logprobs` carry the gradient; `rollout_logprobs` are the sampler's. `advantages` may be `[B, 1]`. Only the
    tokens of `loss_mask` train. `ages` are the train steps since the weights that sampled each token: at age 0 learner
    and sampler hold the same weights and their ratio differs from 1 by rounding only (None: all tokens are of other
    weights). `turn_ids` numbers a row's planner turns from 0 (None: a row is one turn). `ref_logprobs` are those of the
    policy that RL starts with, where the loss asks for them. `num_loss_tokens` and `num_trajectories` count those of
    the whole optimizer step, so that sums over microbatches equal one large batch. `correction` weighs tokens.
    """

    learner_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    num_loss_tokens: int
    num_trajectories: int
    correction: CorrectionConfig
    ages: Tensor | None = None
    turn_ids: Tensor | None = None
    ref_logprobs: Tensor | None = None


PolicyLoss = Callable[[LossInputs], LossOutput]


def policy_loss(config: LossConfig) -> PolicyLoss:
    """The loss that a recipe names. Raises OwnCodeError where one's own cannot be used."""
    match config:
        case DapoConfig():
            return partial(dapo_loss, clip_low=config.clip_low, clip_high=config.clip_high)
        case GrpoConfig():
            return partial(grpo_loss, clip=config.clip)
        case FlowGrpoConfig():
            return partial(flow_grpo_loss, clip=config.clip, kl_weight=config.kl_weight)
        case CispoConfig():
            return partial(cispo_loss, max_weight=config.max_weight)
        case GspoConfig():
            return partial(gspo_loss, clip_low=config.clip_low, clip_high=config.clip_high)
        case DrGrpoConfig():
            return partial(dr_grpo_loss, clip=config.clip, length=config.length)
        case CustomLossConfig():
            return partial(_own_loss, config.load(), config)


def _own_loss(function: Callable[..., Any], config: CustomLossConfig, inputs: LossInputs) -> LossOutput:
    try:
        output = function(inputs, **config.settings)
    except Exception as error:
        raise OwnCodeError(f"learner.loss.function: '{config.function}' failed with {failure(error)}") from error
    if not isinstance(output, LossOutput) or not _is_loss(output.loss, inputs):
        raise OwnCodeError(
            f"learner.loss.function: '{config.function}' must return a learner.losses.LossOutput whose loss is a "
            f"tensor of one number with a gradient, it returned {_in_words(output)}"
        )
    return LossOutput(loss=output.loss, metrics=_own_sums(output.metrics, config))


def _is_loss(loss: object, inputs: LossInputs) -> bool:
    """One number, through which the gradient goes on where there is one."""
    if not isinstance(loss, Tensor) or loss.dim():
        return False
    return loss.requires_grad or not inputs.learner_logprobs.requires_grad


def _own_sums(metrics: object, config: CustomLossConfig) -> dict[str, float]:
    """Those of `LossOutput.metrics` that are there, as plain numbers; others would be added to the learner's own."""
    try:
        return {name: float(metrics[name]) for name in METRICS if name in metrics}  # type: ignore[index,operator]
    except (TypeError, ValueError, RuntimeError, LookupError):
        raise OwnCodeError(
            f"learner.loss.function: '{config.function}' must return a learner.losses.LossOutput whose metrics are "
            f"numbers by name, they are {metrics!r:.80}"
        ) from None


def _in_words(output: object) -> str:
    if isinstance(output, LossOutput):
        loss: object = output.loss
        if not isinstance(loss, Tensor):
            return f"one with {loss!r:.80}"
        return f"one with a loss of shape {tuple(loss.shape)}" if loss.dim() else "one whose loss has no gradient"
    return f"a {type(output).__name__}"


def dapo_loss(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossOutput:
    """DAPO: minus the token mean of min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). No KL term.

    arXiv 2503.14476, eq. 8, with the batch form of the normaliser: the tokens of the whole optimizer step, those
    without a gradient included.
    """
    losses, metrics = clipped_losses(inputs, clip_low=clip_low, clip_high=clip_high)
    return LossOutput(loss=losses.sum() / max(inputs.num_loss_tokens, 1), metrics=metrics)


def grpo_loss(inputs: LossInputs, *, clip: float = 0.2) -> LossOutput:
    """GRPO: the clipped objective averaged over each trajectory's tokens, then over trajectories.

    arXiv 2402.03300, eq. 3, without its KL term.
    """
    losses, metrics = clipped_losses(inputs, clip_low=clip, clip_high=clip)
    row_means = losses.sum(-1) / inputs.loss_mask.sum(-1).clamp(min=1)
    return LossOutput(loss=row_means.sum() / max(inputs.num_trajectories, 1), metrics=metrics)


def flow_grpo_loss(inputs: LossInputs, *, clip: float = 0.2, kl_weight: float = 0.001) -> LossOutput:
    """Flow-GRPO: the mean over trajectories of the mean over turns of the mean over a turn's tokens, of the clipped
    objective minus `kl_weight` times `reference_k3`.

    arXiv 2510.05592, eq. 5. Without `ref_logprobs` there is no KL term; neither correction nor trust region weigh it.
    """
    losses, metrics = clipped_losses(inputs, clip_low=clip, clip_high=clip)
    if inputs.ref_logprobs is not None:
        k3 = reference_k3(inputs.learner_logprobs, inputs.ref_logprobs, inputs.loss_mask)
        losses = losses + kl_weight * k3
        metrics["kl_ref_k3"] = float(k3.detach().sum())
    weighted = losses * _turn_weights(inputs.loss_mask, inputs.turn_ids)
    return LossOutput(loss=weighted.sum() / max(inputs.num_trajectories, 1), metrics=metrics)


def cispo_loss(inputs: LossInputs, *, max_weight: float = 5.0) -> LossOutput:
    """CISPO: minus the token mean of sg(min(r, max_weight)) A log pi, where sg stops the gradient. No token is clipped
    out of the gradient, however far it has moved.

    MiniMax-M1, arXiv 2506.13585, eq. 4 and 5, where max_weight is 1 + eps_high and, as there, nothing bounds r below;
    normalised as `dapo_loss`. The value is minus the mean of weight times advantage, as for the other losses; the
    gradient is that of the equation. `clip_high` counts stale tokens whose weight is bounded.
    """
    mask = inputs.loss_mask.bool()
    with torch.no_grad():
        ratio = masked_log_ratio(inputs.learner_logprobs, inputs.rollout_logprobs, mask).exp()
        bounded = _older(inputs) & (ratio > max_weight)
    unit = _unit(inputs.learner_logprobs, mask)
    losses = torch.where(mask, -inputs.advantages * ratio.clamp(max=max_weight) * unit, 0.0)
    return LossOutput(
        loss=losses.sum() / max(inputs.num_loss_tokens, 1),
        metrics={"clip_high": float(bounded.sum()), "clip_low": 0.0, "correction_masked": 0.0},
    )


def gspo_loss(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutput:
    """GSPO: the mean over trajectories of the mean over a trajectory's tokens of min(s A, clip(s, 1 - clip_low,
    1 + clip_high) A), with s the geometric mean of the trajectory's token ratios.

    arXiv 2507.18071, eq. 5 and 7; with advantages that differ between tokens it is GSPO-token, eq. 13 and 14, whose
    gradient is the same where they do not. s is over the tokens that train. A trajectory without a stale token is
    not clipped: its s differs from 1 by the rounding of two programs only.
    """
    mask = inputs.loss_mask.bool()
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    with torch.no_grad():
        log_ratio = masked_log_ratio(inputs.learner_logprobs, inputs.rollout_logprobs, mask)
        ratio = (log_ratio.sum(-1, keepdim=True) / lengths).exp().expand_as(log_ratio)
        older = mask & _older(inputs).any(-1, keepdim=True)
    losses, metrics = _inside(inputs, ratio, ratio, older, clip_low=clip_low, clip_high=clip_high)
    row_means = losses.sum(-1) / lengths.squeeze(-1)
    return LossOutput(loss=row_means.sum() / max(inputs.num_trajectories, 1), metrics=metrics)


def dr_grpo_loss(inputs: LossInputs, *, clip: float = 0.2, length: int = 512) -> LossOutput:
    """Dr. GRPO: the mean over trajectories of the clipped objective's sum, divided by the constant `length`, so that a
    token of a long trajectory weighs as much as one of a short one.

    arXiv 2503.20783, section 3.2 and listing 1; the advantages without deviation are `group_centered`.
    """
    losses, metrics = clipped_losses(inputs, clip_low=clip, clip_high=clip)
    return LossOutput(loss=losses.sum() / (max(inputs.num_trajectories, 1) * length), metrics=metrics)


def clipped_losses(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, float]]:
    """PPO's clipped term with the correction's weights: the loss of each token, zero outside the mask, and the sums
    that `LossOutput.metrics` holds. Works in float32 or better."""
    mask = inputs.loss_mask.bool()
    with torch.no_grad():
        log_ratio = masked_log_ratio(inputs.learner_logprobs, inputs.rollout_logprobs, mask)
        weights = correction_weights(inputs.correction, log_ratio, mask)
    return _inside(inputs, log_ratio.exp(), weights, _older(inputs), clip_low=clip_low, clip_high=clip_high)


def _inside(
    inputs: LossInputs, ratio: Tensor, weights: Tensor, older: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, float]]:
    """As `clipped_losses`, where `ratio` decides who is outside the trust region, `weights` those inside are weighed
    with, and `older` tokens alone can be outside; all `[B, T]`."""
    mask, advantages = inputs.loss_mask.bool(), inputs.advantages
    with torch.no_grad():
        bound = ratio.clamp(1 - clip_low, 1 + clip_high)
        too_high = older & (ratio > bound) & (advantages > 0)
        too_low = older & (ratio < bound) & (advantages < 0)
        clipped = too_high | too_low
    unit = _unit(inputs.learner_logprobs, mask)
    losses = torch.where(mask, -advantages * torch.where(clipped, bound, weights * unit), 0.0)
    return losses, {
        "clip_high": float(too_high.sum()),
        "clip_low": float(too_low.sum()),
        "correction_masked": float((mask & ~clipped & (weights == 0)).sum()),
    }


def _older(inputs: LossInputs) -> Tensor:
    """The trained tokens that other weights than the learner's sampled, `[B, T]`."""
    mask = inputs.loss_mask.bool()
    return mask if inputs.ages is None else mask & (inputs.ages > 0)


def _unit(learner_logprobs: Tensor, mask: Tensor) -> Tensor:
    """1 in value; carries the gradient of the log-prob."""
    return masked_log_ratio(learner_logprobs, learner_logprobs.detach(), mask).exp()


def reference_k3(learner_logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = ref - learner log-prob at the tokens of the mask, 0 elsewhere, all `[B, T]`; at most
    `MAX_REFERENCE_K3`, beyond which a token gives no gradient.

    Over tokens that the learner samples its mean is KL(learner || ref). As a loss, which takes the tokens as given, its
    mean gradient is that of the other direction, KL(ref || learner).
    """
    log_ratio = masked_log_ratio(ref_logprobs, learner_logprobs, loss_mask.bool())
    return (log_ratio.exp() - log_ratio - 1).clamp(max=MAX_REFERENCE_K3)


def _turn_weights(loss_mask: Tensor, turn_ids: Tensor | None) -> Tensor:
    """1 / (number of turns in the row) / (tokens of the token's turn) at trained tokens, 0 elsewhere."""
    mask = loss_mask.bool()
    ids = torch.zeros_like(mask, dtype=torch.long) if turn_ids is None else turn_ids.long().clamp(min=0)
    lengths = torch.zeros(mask.shape[0], int(ids.max()) + 1 if ids.numel() else 1, device=mask.device)
    lengths.scatter_add_(1, ids, mask.to(lengths.dtype))
    num_turns = (lengths > 0).sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask, 1.0 / (num_turns * lengths.gather(1, ids).clamp(min=1)), 0.0)
