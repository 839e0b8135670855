"""Reads the sums over a step's loss tokens: how far the batch is off-policy, and whether the step may be taken."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from configs.learner import GuardConfig
from learner.corrections import masked_log_ratio
from learner.types import TrainBatch

_PER_TOKEN = ("clip_high", "clip_low", "ratio", "logprob_gap_abs", "mismatch_k3")


def age_sums(
    learner_logprobs: Tensor, rollout_logprobs: Tensor, weights: Tensor, loss_mask: Tensor, ages: Tensor
) -> dict[str, float]:
    """Sums over loss tokens split by age, the train steps since the weights that sampled the token.

    All `[B, T]`; `weights` are the correction's. The mismatch is k3 = exp(d) - d - 1 with d = learner - rollout
    log-prob, an estimate of KL(rollout || learner). At age 0 both hold the same weights: whatever mismatch there is is
    numerical, or a fault. At `_stale` tokens, which are older, it is staleness too.
    """
    mask = loss_mask.bool()
    stale = mask & (ages > 0)
    age0 = mask & ~stale
    with torch.no_grad():
        difference = masked_log_ratio(learner_logprobs, rollout_logprobs, mask)
        mismatch = difference.exp() - difference - 1
        return {
            "age": float(ages[mask].sum()),
            "tokens_age0": float(age0.sum()),
            "tokens_stale": float(stale.sum()),
            "mismatch_k3_age0": float(mismatch[age0].sum()),
            "mismatch_k3_stale": float(mismatch[stale].sum()),
            "weight_stale": float(weights[stale].sum()),
            "weight_squared_stale": float(weights[stale].square().sum()),
        }


def off_policy_metrics(sums: Mapping[str, float], batch: TrainBatch) -> dict[str, float]:
    """The sums of the losses and of `age_sums` as metrics per token.

    What is split by age is there only where such tokens are.
    """
    tokens = max(batch.num_loss_tokens, 1)
    sampled = max(batch.num_loss_tokens + batch.num_masked_tokens, 1)
    metrics = {name: sums.get(name, 0.0) / tokens for name in _PER_TOKEN}
    metrics |= {
        "effective_sample_size": _effective_share(sums, "", tokens),
        "correction_masked_share": sums.get("correction_masked", 0.0) / tokens,
        "stale_masked_share": batch.num_masked_tokens / sampled,
        "staleness_max": float(batch.max_age),
        "age_mean": sums.get("age", 0.0) / tokens,
    }
    if sums.get("tokens_age0"):
        metrics["mismatch_k3_age0"] = sums["mismatch_k3_age0"] / sums["tokens_age0"]
    if sums.get("tokens_stale"):
        metrics["mismatch_k3_stale"] = sums["mismatch_k3_stale"] / sums["tokens_stale"]
        metrics["effective_sample_size_stale"] = _effective_share(sums, "_stale", sums["tokens_stale"])
    if "kl_ref_k3" in sums:
        metrics["kl_ref_k3"] = sums["kl_ref_k3"] / tokens
    return metrics


def refusal(metrics: Mapping[str, float], batch: TrainBatch, guard: GuardConfig) -> str | None:
    """Why the optimizer step must not be taken, in one sentence; None where it may.

    `metrics` are those of `off_policy_metrics`, with `loss` and `grad_norm`.
    """
    if not batch.num_loss_tokens:
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
    mismatch = metrics.get("mismatch_k3_age0", 0.0)
    if not mismatch <= guard.max_mismatch_k3_age0:
        return (
            f"step skipped: policy/mismatch_k3_age0 = {mismatch:.3g} is above "
            f"learner.guard.max_mismatch_k3_age0 = {guard.max_mismatch_k3_age0:g}; engine and learner disagree on the "
            "same weights: check the adapter the engine serves, its log-prob mode and temperature"
        )
    share = metrics["effective_sample_size"]
    if not share >= guard.min_effective_sample_share:
        return (
            f"step skipped: policy/effective_sample_size = {share:.3g} is below "
            f"learner.guard.min_effective_sample_share = {guard.min_effective_sample_share:g}; the batch is too far "
            "off-policy: lower pipeline_depth or learner.learning_rate"
        )
    return None


def _effective_share(sums: Mapping[str, float], suffix: str, tokens: float) -> float:
    """Effective sample size per token: (sum w)^2 / (n sum w^2), 1 where all weights are equal."""
    weight, squared = sums.get(f"weight{suffix}", 0.0), sums.get(f"weight_squared{suffix}", 0.0)
    return weight**2 / max(tokens * squared, 1e-12)
