"""Policy losses as pure functions of tensors. Denominators are inputs, so microbatches add up to one large batch.

A batch gives one optimizer step, so the gradient is taken at the learner's own weights. PPO's clipped term min(r A,
clip(r) A), with r = learner / rollout, is then r times plain REINFORCE inside a one-sided trust region around the
sampler, and has no gradient outside: above 1 + clip_high where A > 0, below 1 - clip_low where A < 0 (PPO, arXiv
1707.06347, eq. 7). A correction bounds r as a weight. `gspo` has one r per row; `cispo` only bounds r.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from configs.learner import Correction, CustomLossConfig, DapoConfig, FixedLossConfig, FlowGrpoConfig, LossConfig
from configs.plugins import OwnCodeError, failure
from learner.corrections import correction_weights, masked_log_ratio

MAX_REFERENCE_K3 = 10.0
"""In nats. A token that is far less likely under the learner than under the reference would dominate a batch."""

METRICS = ("clip_high", "clip_low", "correction_masked", "kl_ref_k3")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The loss of a microbatch, a scalar with a gradient, and its metrics."""

    loss: Tensor
    metrics: dict[str, float]
    """Sums over the loss tokens: `clip_high` and `clip_low` count tokens outside the trust region, `correction_masked`
    tokens inside it with weight 0; `kl_ref_k3` is there with a KL term. Other names of a custom loss are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One microbatch of an optimizer step. A row is a trajectory or a branch of one; all tensors are `[B, T]`."""

    learner_logprobs: Tensor
    """With the gradient."""
    rollout_logprobs: Tensor
    """Of the sampler."""
    advantages: Tensor
    """May be `[B, 1]`."""
    loss_mask: Tensor
    """True at the tokens that train."""
    num_loss_tokens: int
    """Of the whole optimizer step, as `num_trajectories`."""
    num_trajectories: int
    correction: Correction
    """Weight of a token by its ratio."""
    correction_band: tuple[float, float]
    """Bounds of a ratio for `icepop` and `sequence_reject`."""
    ages: Tensor
    """Train steps since the weights that sampled each token. At age 0 their ratio to the learner's differs from 1 by
    rounding only."""
    turn_ids: Tensor
    """Numbers a row's planner turns from 0."""
    row_weights: Tensor
    """`[B, 1]`, each row's share of its trajectory: 1 / branches that train."""
    ref_logprobs: Tensor | None = None
    """Of the policy that RL starts with, if the loss needs them."""


PolicyLoss = Callable[[LossInputs], LossOutput]


def policy_loss(config: LossConfig) -> PolicyLoss:
    """Return the loss that a recipe names. Raises OwnCodeError if a custom loss cannot be called."""
    match config:
        case DapoConfig():
            return partial(dapo_loss, clip_low=config.clip_low, clip_high=config.clip_high)
        case FlowGrpoConfig():
            return partial(flow_grpo_loss, kl_weight=config.kl_weight)
        case FixedLossConfig():
            fixed: dict[str, PolicyLoss] = {
                "grpo": grpo_loss,
                "cispo": cispo_loss,
                "gspo": gspo_loss,
                "dr_grpo": dr_grpo_loss,
            }
            return fixed[config.type]
        case CustomLossConfig():
            return partial(_custom_loss, config.load(), config)


def _custom_loss(function: Callable[..., object], config: CustomLossConfig, inputs: LossInputs) -> LossOutput:
    must = f"learner.loss.function: '{config.function}' must return a learner.losses.LossOutput whose"
    try:
        output = function(inputs, **config.settings)
    except Exception as error:
        raise OwnCodeError(f"learner.loss.function: '{config.function}' failed with {failure(error)}") from None
    if (
        not isinstance(output, LossOutput)
        or not isinstance(output.loss, Tensor)
        or output.loss.dim()
        or (inputs.learner_logprobs.requires_grad and not output.loss.requires_grad)
    ):
        raise OwnCodeError(f"{must} loss is a tensor of one number with a gradient, it returned {output!r:.120}")
    try:
        # Other names could overwrite the learner's own sums.
        metrics = {name: float(output.metrics[name]) for name in METRICS if name in output.metrics}
    except (TypeError, ValueError, RuntimeError, LookupError):
        raise OwnCodeError(f"{must} metrics are numbers by name, they are {output.metrics!r:.80}") from None
    return LossOutput(loss=output.loss, metrics=metrics)


def dapo_loss(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossOutput:
    """Return DAPO's loss: minus the token mean of min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), without a KL term.

    arXiv 2503.14476, eq. 8. The mean is over all loss tokens of the optimizer step.
    """
    losses, metrics = clipped_losses(inputs, clip_low=clip_low, clip_high=clip_high)
    return LossOutput(loss=losses.sum() / max(inputs.num_loss_tokens, 1), metrics=metrics)


def grpo_loss(inputs: LossInputs, *, clip: float = 0.2) -> LossOutput:
    """Return GRPO's loss: the clipped objective averaged over each trajectory's tokens, then over trajectories.

    arXiv 2402.03300, eq. 3, without its KL term.
    """
    losses, metrics = clipped_losses(inputs, clip_low=clip, clip_high=clip)
    row_means = (losses * inputs.row_weights).sum(-1) / inputs.loss_mask.sum(-1).clamp(min=1)
    return LossOutput(loss=row_means.sum() / max(inputs.num_trajectories, 1), metrics=metrics)


def flow_grpo_loss(inputs: LossInputs, *, clip: float = 0.2, kl_weight: float = 0.001) -> LossOutput:
    """Return Flow-GRPO's loss: the clipped objective minus `kl_weight` times `reference_k3`.

    Averaged over a turn's tokens, then over turns, then over trajectories (arXiv 2510.05592, eq. 5). Correction and
    trust region do not apply to the KL term.
    """
    losses, metrics = clipped_losses(inputs, clip_low=clip, clip_high=clip)
    if inputs.ref_logprobs is not None:
        k3 = reference_k3(inputs.learner_logprobs, inputs.ref_logprobs, inputs.loss_mask)
        losses = losses + kl_weight * k3
        metrics["kl_ref_k3"] = float(k3.detach().sum())
    weighted = losses * inputs.row_weights * _turn_weights(inputs.loss_mask, inputs.turn_ids)
    return LossOutput(loss=weighted.sum() / max(inputs.num_trajectories, 1), metrics=metrics)


def cispo_loss(inputs: LossInputs, *, max_weight: float = 5.0) -> LossOutput:
    """Return CISPO's loss: minus the token mean of sg(min(r, max_weight)) A log pi, where sg stops the gradient.

    No token is clipped out of the gradient (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5, where max_weight is 1 +
    eps_high). The value is minus the mean of weight times advantage, as for the other losses; the gradient is that of
    the equation. `clip_high` counts stale tokens whose weight is bounded.
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
    """Return GSPO's loss on min(s A, clip(s, 1 - clip_low, 1 + clip_high) A).

    s is the geometric mean of the ratios of a row's loss tokens. The loss is averaged over a trajectory's
    tokens, then over trajectories (arXiv 2507.18071, eq. 5 and 7; for advantages that differ between tokens eq. 13 and
    14). A row without a stale token is not clipped: its s differs from 1 by rounding only.
    """
    mask = inputs.loss_mask.bool()
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)
    with torch.no_grad():
        log_ratio = masked_log_ratio(inputs.learner_logprobs, inputs.rollout_logprobs, mask)
        ratio = (log_ratio.sum(-1, keepdim=True) / lengths).exp().expand_as(log_ratio)
        older = mask & _older(inputs).any(-1, keepdim=True)
    losses, metrics = _clip(inputs, ratio, ratio, older, clip_low=clip_low, clip_high=clip_high)
    row_means = (losses * inputs.row_weights).sum(-1) / lengths.squeeze(-1)
    return LossOutput(loss=row_means.sum() / max(inputs.num_trajectories, 1), metrics=metrics)


def dr_grpo_loss(inputs: LossInputs, *, clip: float = 0.2, length: int = 512) -> LossOutput:
    """Return Dr. GRPO's loss: the sum of the clipped objective over the constant `length`, averaged over trajectories.

    arXiv 2503.20783, section 3.2 and listing 1. The advantages without deviation are `group_centered`.
    """
    losses, metrics = clipped_losses(inputs, clip_low=clip, clip_high=clip)
    return LossOutput(loss=losses.sum() / (max(inputs.num_trajectories, 1) * length), metrics=metrics)


def clipped_losses(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, float]]:
    """Return PPO's clipped term with the correction's weights per token, zero outside the mask, and the metrics."""
    mask = inputs.loss_mask.bool()
    with torch.no_grad():
        log_ratio = masked_log_ratio(inputs.learner_logprobs, inputs.rollout_logprobs, mask)
        weights = correction_weights(inputs.correction, log_ratio, mask, inputs.correction_band)
    return _clip(inputs, log_ratio.exp(), weights, _older(inputs), clip_low=clip_low, clip_high=clip_high)


def _clip(
    inputs: LossInputs, ratio: Tensor, weights: Tensor, older: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, float]]:
    """Return what `clipped_losses` returns; all tensors are `[B, T]`.

    `ratio` decides which of the `older` tokens are outside the trust region. `weights` apply to the tokens inside.
    """
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
    """Return `[B, T]`, the loss tokens that older weights sampled."""
    return inputs.loss_mask.bool() & (inputs.ages > 0)


def _unit(learner_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return ones that carry the gradient of the log-probs."""
    return masked_log_ratio(learner_logprobs, learner_logprobs.detach(), mask).exp()


def reference_k3(learner_logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Return exp(d) - d - 1 with d = ref - learner log-prob at the tokens of the mask, 0 elsewhere, all `[B, T]`.

    At most `MAX_REFERENCE_K3`, beyond which a token has no gradient. Over tokens that the learner samples the mean is
    KL(learner || ref). As a loss its mean gradient is that of KL(ref || learner).
    """
    log_ratio = masked_log_ratio(ref_logprobs, learner_logprobs, loss_mask.bool())
    return (log_ratio.exp() - log_ratio - 1).clamp(max=MAX_REFERENCE_K3)


def _turn_weights(loss_mask: Tensor, turn_ids: Tensor) -> Tensor:
    """Return 1 / (turns of the row) / (tokens of the token's turn) at loss tokens, 0 elsewhere, `[B, T]`."""
    mask = loss_mask.bool()
    ids = turn_ids.clamp(min=0)
    lengths = torch.zeros(mask.shape[0], int(ids.max()) + 1 if ids.numel() else 1, device=mask.device)
    lengths.scatter_add_(1, ids, mask.to(lengths.dtype))
    num_turns = (lengths > 0).sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask, 1.0 / (num_turns * lengths.gather(1, ids).clamp(min=1)), 0.0)
