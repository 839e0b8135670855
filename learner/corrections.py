"""Off-policy corrections: what a token weighs that other weights, or the same ones in another program, sampled."""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from configs.learner import CorrectionKind

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to plus and minus this before `exp`: finite, and far beyond every bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A correction by name, with its bounds. In all of them w is the token's ratio proximal / rollout.

    none: weight 1.
    bypass: weight 1; the loss takes its ratio against the rollout log-probs directly, so w would count twice.
    decoupled: w (decoupled PPO, arXiv 2110.00641, 2505.24298); only the log ratio is clamped.
    tis: min(w, `max_weight`) (truncated importance sampling).
    icepop: w where `low` <= w <= `high`, else 0 (arXiv 2510.18855, section 2.3.2).
    tv_mask: w, but 0 where the probability moved by more than `max_probability_gap` the way the advantage pushes it:
        proximal - rollout with A > 0, rollout - proximal with A < 0. Unlike a ratio this lets rare tokens be.
    sequence_reject: min(w, `max_weight`), but 0 for a whole row where the geometric mean of w over its loss tokens is
        outside [`low`, `high`].
    """

    kind: CorrectionKind
    max_weight: float = 2.0
    low: float = 0.5
    high: float = 5.0
    max_probability_gap: float = 0.2

    def __post_init__(self) -> None:
        if self.kind not in get_args(CorrectionKind):
            raise ValueError(f"correction '{self.kind}' is unknown; use one of {', '.join(get_args(CorrectionKind))}")
        if not self.max_weight >= 1:
            raise ValueError(
                f"correction max_weight must be >= 1, the weight of an on-policy token; got {self.max_weight}"
            )
        if not 0 < self.low <= 1 <= self.high:
            raise ValueError(f"the correction's band must hold 1, the on-policy ratio; got {self.low} to {self.high}")
        if not self.max_probability_gap > 0:
            raise ValueError(f"correction max_probability_gap must be > 0, got {self.max_probability_gap}")


@torch.no_grad()
def correction_weights(
    correction: Correction,
    proximal_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
) -> tuple[Tensor, dict[str, float]]:
    """The factor of every token's loss under `correction`, and its sums over the loss tokens.

    All tensors `[B, T]`, a row is a trajectory; `advantages` may be `[B, 1]`. Returns detached weights `[B, T]`, 0
    outside the loss mask, and the sums `weight`, `weight_squared` and `correction_masked` (loss tokens whose weight is
    0). Masked tokens stay in the loss's denominators. A log-prob that is not a number keeps its token's weight nan
    under every kind that reads it: it must be noticed, not dropped.
    """
    mask = loss_mask.bool()
    log_ratio = masked_log_ratio(proximal_logprobs, rollout_logprobs, mask)
    ratio = log_ratio.exp()
    match correction.kind:
        case "none" | "bypass":
            weights = torch.ones_like(ratio)
        case "decoupled":
            weights = ratio
        case "tis":
            weights = ratio.clamp(max=correction.max_weight)
        case "icepop":
            weights = ratio.masked_fill(_outside(ratio, correction), 0.0)
        case "tv_mask":
            gap = _probability_gap(proximal_logprobs, rollout_logprobs, mask) * advantages.sign()
            weights = ratio.masked_fill(gap > correction.max_probability_gap, 0.0)
        case "sequence_reject":
            mean = (log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).exp()
            # The mean judges the row only; a kept token's weight is still truncated.
            weights = ratio.clamp(max=correction.max_weight).masked_fill(_outside(mean, correction), 0.0)
    weights = torch.where(mask, weights, 0.0)
    return weights, {
        "weight": float(weights.sum()),
        "weight_squared": float(weights.square().sum()),
        "correction_masked": float((mask & (weights == 0)).sum()),
    }


def masked_log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """numerator - denominator of two log-probs `[B, T]` at the tokens of `mask`, 0 elsewhere, clamped; in float32 or
    better. Outside the mask a log-prob may be anything, -inf included, and reaches neither value nor gradient."""
    return torch.where(mask, _precise(numerator) - _precise(denominator), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _outside(ratio: Tensor, correction: Correction) -> Tensor:
    return (ratio < correction.low) | (ratio > correction.high)


def _probability_gap(proximal_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    proximal, rollout = (torch.where(mask, _precise(one), 0.0).exp() for one in (proximal_logprobs, rollout_logprobs))
    return proximal - rollout


def _precise(logprobs: Tensor) -> Tensor:
    return logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
