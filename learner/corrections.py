"""Corrections for tokens that other weights or another engine sampled, and the guard against bad batches."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from configs.learner import Correction
from learner.types import TrainBatch

MAX_LOG_RATIO = 20.0
"""Bound of log ratios before `exp`, in nats, far beyond every clip."""
MAX_WEIGHT = 2.0
"""Of a token under `tis` and `sequence_reject`; 1 is the weight of an on-policy token."""


@torch.no_grad()
def correction_weights(
    correction: Correction, log_ratio: Tensor, loss_mask: Tensor, band: tuple[float, float]
) -> Tensor:
    """Return the factor of every token's loss: detached, `[B, T]`, 0 outside the loss mask.

    `log_ratio` `[B, T]` comes from `masked_log_ratio`; a row is a trajectory. `band` are the bounds of a ratio for
    `icepop` and `sequence_reject`. Rejected tokens stay in the loss's denominators. nan stays nan, so that the guard
    notices it.
    """
    mask = loss_mask.bool()
    ratio, (low, high) = log_ratio.exp(), band
    match correction:
        case "none":
            weights = ratio
        case "tis":
            weights = ratio.clamp(max=MAX_WEIGHT)
        case "icepop":
            weights = ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
        case "sequence_reject":
            mean = (log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).exp()
            rejected = (mean < low) | (mean > high)
            # The mean decides about the row only. The weights of a kept row are truncated all the same.
            weights = ratio.clamp(max=MAX_WEIGHT).masked_fill(rejected, 0.0)
    return torch.where(mask, weights, 0.0)


def masked_log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """Return numerator - denominator of two log-probs `[B, T]` at the tokens of `mask`, clamped, 0 elsewhere.

    Computed in float32 or better. Outside the mask any value, -inf included, reaches neither value nor gradient.
    """
    numerator, denominator = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (numerator, denominator))
    return torch.where(mask, numerator - denominator, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


DECIDED = 0.999
"""Probability above which, under both sampler and learner, a token is no choice but scaffolding of the grammar. Such
tokens are most of a planner's reply, and a mean over them would hide how far the others are off-policy."""

LEAST_EVIDENCE = 64
"""Choice tokens at age 0 that a batch should have. Missing ones count as agreeing: of eight tokens a single one that is
rounded by 0.5 nats would refuse the whole batch."""

MIN_EFFECTIVE_SAMPLE_SHARE = 0.3
"""Least effective sample size, as a share of the choice tokens, for which the guard takes a step."""

MAX_MISMATCH_K3_AGE0 = 0.05
"""Largest mean k3 per choice token of the same weights, in nats. More is not staleness: the engine has other weights or
computes wrongly."""

MAX_MISMATCH_K3_STALE = 1.0
"""The same for choice tokens of older weights."""


def off_policy_sums(
    learner_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, ages: Tensor
) -> dict[str, float]:
    """Return sums over choice tokens (loss tokens that are not `DECIDED`), in total and by age.

    All tensors are `[B, T]`; `ages` are the train steps since the weights that sampled the token. The mismatch is k3 =
    exp(d) - d - 1 with d = learner - rollout log-prob, an estimate of KL(rollout || learner) in nats. At age 0 it is
    numerical or a fault; at `_stale` tokens, which are older, it includes staleness. The entropy is minus the log-prob
    of the loss tokens, whose mean over samples is the entropy of the sampler.
    """
    mask = loss_mask.bool()
    with torch.no_grad():
        difference = masked_log_ratio(learner_logprobs, rollout_logprobs, mask)
        ratio = difference.exp()
        lower = torch.minimum(learner_logprobs, rollout_logprobs.to(learner_logprobs.dtype))
        # Negated, so that a log-prob of nan counts as a choice and the guard notices it.
        choice = mask & ~(lower > math.log(DECIDED))
        stale = choice & (ages > 0)
        tokens = {"": choice, "_age0": choice & ~stale, "_stale": stale}
        sums = {
            "age": float(ages[mask].sum()),
            "entropy": -float(rollout_logprobs[mask].sum()),
            "logprob_gap_abs": float(difference[choice].abs().sum()),
        }
        for suffix, chosen in tokens.items():
            sums |= {
                f"choice_tokens{suffix}": float(chosen.sum()),
                f"mismatch_k3{suffix}": float((ratio - difference - 1)[chosen].sum()),
                f"ratio{suffix}": float(ratio[chosen].sum()),
                f"ratio_squared{suffix}": float(ratio[chosen].square().sum()),
            }
        return sums


def off_policy_metrics(sums: Mapping[str, float], batch: TrainBatch) -> dict[str, float]:
    """Return the sums of a loss and of `off_policy_sums` as shares of the loss tokens and means over choice tokens.

    Metrics of an age exist only if the batch has such tokens.
    """
    tokens, choice_tokens = max(batch.num_loss_tokens, 1), sums.get("choice_tokens", 0.0)
    sampled = max(batch.num_loss_tokens + batch.num_masked_tokens, 1)
    metrics = {
        "clip_high": sums.get("clip_high", 0.0) / tokens,
        "clip_low": sums.get("clip_low", 0.0) / tokens,
        "correction_masked_share": sums.get("correction_masked", 0.0) / tokens,
        "stale_masked_share": batch.num_masked_tokens / sampled,
        "staleness_max": float(batch.max_age),
        "age_mean": sums.get("age", 0.0) / tokens,
        "entropy": sums.get("entropy", 0.0) / tokens,
        "choice_tokens": choice_tokens,
        "logprob_gap_abs": sums.get("logprob_gap_abs", 0.0) / max(choice_tokens, 1),
        "ratio": sums.get("ratio", 0.0) / max(choice_tokens, 1),
    }
    for suffix in ("", "_age0", "_stale"):
        if count := sums.get(f"choice_tokens{suffix}"):
            metrics[f"choice_tokens{suffix}"] = count
            metrics[f"mismatch_k3{suffix}"] = sums[f"mismatch_k3{suffix}"] / count
            # (sum r)^2 / (n sum r^2): 1 if all ratios are equal.
            ratio, squared = sums[f"ratio{suffix}"], sums[f"ratio_squared{suffix}"]
            metrics[f"effective_sample_size{suffix}"] = ratio**2 / max(count * squared, 1e-12)
    if "kl_ref_k3" in sums:
        metrics["kl_ref_k3"] = sums["kl_ref_k3"] / tokens
    return metrics


def refusal(metrics: Mapping[str, float], batch: TrainBatch, *, guard: bool = True) -> str | None:
    """Return the reason to skip the optimizer step, None to take it.

    `metrics` are those of `off_policy_metrics`, `loss` and `grad_norm`. Without `guard` only a batch without loss
    tokens and values that are not finite are reasons.
    """
    if not batch.num_loss_tokens:
        if not batch.num_masked_tokens:
            return "step skipped: the batch has no sampled tokens to train on; look for empty completions in it"
        return (
            f"step skipped: the batch has no loss tokens, {batch.num_masked_tokens} were masked as too old; "
            "raise the staleness cap or lower pipeline_depth"
        )
    for name in ("loss", "grad_norm"):
        if not math.isfinite(metrics[name]):
            return (
                f"step skipped: policy/{name} must be finite, it is {metrics[name]}; look for log-probs that are "
                "not finite in this batch's trajectories, or lower learner.learning_rate"
            )
    if not guard:
        return None

    def beyond(name: str, bound: float, problem: str) -> str:
        return f"step skipped: policy/{name} = {metrics[name]:.3g}, and the guard's bound is {bound:g}; {problem}"

    # Negated comparisons refuse nan.
    tokens = metrics.get("choice_tokens_age0", 0.0)
    if not metrics.get("mismatch_k3_age0", 0.0) * min(1.0, tokens / LEAST_EVIDENCE) <= MAX_MISMATCH_K3_AGE0:
        disagree = f"engine and learner disagree on {tokens:.0f} tokens of the same weights"
        remedy = "check the adapter the engine serves, its log-prob mode and temperature"
        return beyond("mismatch_k3_age0", MAX_MISMATCH_K3_AGE0, f"{disagree}: {remedy}")
    far_off = "the batch is too far off-policy; if this happens often, lower pipeline_depth or learner.learning_rate"
    if not metrics.get("mismatch_k3_stale", 0.0) <= MAX_MISMATCH_K3_STALE:
        return beyond("mismatch_k3_stale", MAX_MISMATCH_K3_STALE, far_off)
    if not metrics.get("effective_sample_size", 1.0) >= MIN_EFFECTIVE_SAMPLE_SHARE:
        return beyond("effective_sample_size", MIN_EFFECTIVE_SAMPLE_SHARE, far_off)
    return None
