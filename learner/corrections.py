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
    """A correction by name, with its bounds. In all of them r is the token's ratio learner / rollout.

    none: r, as in PPO.
    tis: min(r, `max_weight`) (truncated importance sampling).
    icepop: r where `low` <= r <= `high`, else 0 (arXiv 2510.18855, section 2.3.2).
    sequence_reject: min(r, `max_weight`), but 0 for a whole row where the geometric mean of r over its loss tokens is
        outside [`low`, `high`].
    """

    kind: CorrectionKind
    max_weight: float = 2.0
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(CorrectionKind):
            raise ValueError(f"correction '{self.kind}' is unknown; use one of {', '.join(get_args(CorrectionKind))}")
        if not self.max_weight >= 1:
            raise ValueError(
                f"correction max_weight must be >= 1, the weight of an on-policy token; got {self.max_weight}"
            )
        if not 0 < self.low <= 1 <= self.high:
            raise ValueError(f"the correction's band must hold 1, the on-policy ratio; got {self.low} to {self.high}")


@torch.no_grad()
def correction_weights(correction: Correction, log_ratio: Tensor, loss_mask: Tensor) -> Tensor:
    """The factor of every token's loss under `correction`: detached, `[B, T]`, 0 outside the loss mask.

    `log_ratio` `[B, T]` is that of `masked_log_ratio`; a row is a trajectory. Tokens whose weight is 0 stay in the
    loss's denominators. A log ratio that is not a number keeps its token's weight nan: it must be noticed, not dropped.
    """
    mask = loss_mask.bool()
    ratio = log_ratio.exp()
    match correction.kind:
        case "none":
            weights = ratio
        case "tis":
            weights = ratio.clamp(max=correction.max_weight)
        case "icepop":
            weights = ratio.masked_fill(_outside(ratio, correction), 0.0)
        case "sequence_reject":
            mean = (log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).exp()
            # The mean judges the row only; a kept token's weight is still truncated.
            weights = ratio.clamp(max=correction.max_weight).masked_fill(_outside(mean, correction), 0.0)
    return torch.where(mask, weights, 0.0)


def masked_log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """numerator - denominator of two log-probs `[B, T]` at the tokens of `mask`, 0 elsewhere, clamped; in float32 or
    better. Outside the mask a log-prob may be anything, -inf included, and reaches neither value nor gradient."""
    return torch.where(mask, _precise(numerator) - _precise(denominator), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _outside(ratio: Tensor, correction: Correction) -> Tensor:
    return (ratio < correction.low) | (ratio > correction.high)


def _precise(logprobs: Tensor) -> Tensor:
    return logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
