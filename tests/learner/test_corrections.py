import math
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import loss_inputs

from configs.learner import Correction
from learner.corrections import correction_weights, masked_log_ratio
from learner.losses import dapo_loss, flow_grpo_loss, grpo_loss

KINDS = get_args(Correction)
# Probabilities of the sampled tokens; ratios 6, 0.2, 1 / 0.6, 2.5 (the last is masked), advantages +1 / -1.
ROLLOUT = torch.tensor([[0.1, 0.5, 0.4], [0.75, 0.2, 0.5]], dtype=torch.float64).log()
LEARNER = torch.tensor([[0.6, 0.1, 0.4], [0.45, 0.5, 0.5]], dtype=torch.float64).log()
ADVANTAGES = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
# Five loss tokens whatever is rejected. 6 with A > 0 and 0.6 with A < 0 are outside the trust region [0.8, 1.28]: their
# losses are the constants -1.28 and +0.8. A token inside has the loss and the gradient -w A.
EXPECTED = {
    "none": (0.82, [[0.0, -0.2, -1.0], [0.0, 2.5, 0.0]], 0),
    # 2.5 is truncated to 2
    "tis": (0.32, [[0.0, -0.2, -1.0], [0.0, 2.0, 0.0]], 0),
    # 0.2 is outside [0.5, 5]
    "icepop": (1.02, [[0.0, 0.0, -1.0], [0.0, 2.5, 0.0]], 1),
    # geometric means (6 x 0.2 x 1)^(1/3) = 1.063 and (0.6 x 2.5)^(1/2) = 1.225, the band ends at 1.2
    "sequence_reject": (-1.68, [[0.0, -0.2, -1.0], [0.0, 0.0, 0.0]], 1),
}
LOSSES = {"dapo": dapo_loss, "grpo": grpo_loss, "flow_grpo": partial(flow_grpo_loss, kl_weight=0.1)}


def inputs_of(learner, rollout, advantages, mask, *, rows=slice(None), **options):
    return loss_inputs(
        learner[rows],
        rollout[rows],
        advantages[rows],
        mask[rows],
        **({"num_trajectories": 2, "ref_logprobs": ROLLOUT[rows]} | options),
    )


def make_correction(kind):
    return {"correction": kind, "correction_band": (0.8, 1.2) if kind == "sequence_reject" else (0.5, 5.0)}


@pytest.mark.parametrize("kind", KINDS)
def test_corrections_match_the_hand_computed_example(kind):
    learner = LEARNER.clone().requires_grad_()
    output = dapo_loss(inputs_of(learner, ROLLOUT, ADVANTAGES, MASK, **make_correction(kind)))
    output.loss.backward()
    total, gradient, masked = EXPECTED[kind]
    assert output.loss.item() == pytest.approx(total / 5, abs=1e-9)
    assert torch.allclose(learner.grad, torch.tensor(gradient, dtype=torch.float64) / 5, atol=1e-9)
    assert output.metrics == {"clip_high": 1, "clip_low": 1, "correction_masked": masked}


def test_tokens_of_age_0_keep_their_gradient_at_any_ratio():
    """At age 0 a ratio differs from 1 by the rounding of two programs only."""
    ages = torch.tensor([[0, 0, 1], [0, 1, 0]])
    learner = LEARNER.clone().requires_grad_()
    output = dapo_loss(inputs_of(learner, ROLLOUT, ADVANTAGES, MASK, correction="tis", ages=ages))
    output.loss.backward()
    expected = torch.tensor([[-2.0, -0.2, -1.0], [0.6, 2.0, 0.0]], dtype=torch.float64) / 5
    assert torch.allclose(learner.grad, expected, atol=1e-9)
    assert (output.metrics["clip_high"], output.metrics["clip_low"]) == (0, 0)


@pytest.mark.parametrize(("kind", "loss"), [*((kind, "dapo") for kind in KINDS), ("tis", "grpo"), ("tis", "flow_grpo")])
@pytest.mark.parametrize("poison", [-math.inf, math.nan])
def test_values_outside_the_mask_reach_neither_loss_nor_gradient_nor_metrics(kind, loss, poison):
    def run(learner, rollout, advantages):
        learner = learner.clone().requires_grad_()
        output = LOSSES[loss](inputs_of(learner, rollout, advantages, MASK, **make_correction(kind)))
        output.loss.backward()
        return output, learner.grad

    clean = (LEARNER, ROLLOUT, ADVANTAGES.expand(2, 3))
    broken = [torch.where(MASK, tensor, poison) for tensor in clean]
    (expected, gradient), (found, found_gradient) = run(*clean), run(*broken)
    assert found.loss.item() == expected.loss.item()
    assert torch.equal(found_gradient, gradient)
    assert found.metrics == expected.metrics


@pytest.mark.parametrize("kind", KINDS)
def test_microbatch_without_loss_tokens_has_a_zero_gradient(kind):
    learner = LEARNER.clone().requires_grad_()
    output = dapo_loss(inputs_of(learner, ROLLOUT, ADVANTAGES, torch.zeros_like(MASK), correction=kind))
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert torch.equal(learner.grad, torch.zeros_like(learner))


@pytest.mark.parametrize("kind", KINDS)
def test_log_prob_of_nan_gives_a_loss_of_nan(kind):
    rollout = ROLLOUT.clone()
    rollout[0, 0] = math.nan
    assert math.isnan(dapo_loss(inputs_of(LEARNER, rollout, ADVANTAGES, MASK, correction=kind)).loss.item())


LOG_RATIOS = st.lists(st.floats(-100, 100), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(LOG_RATIOS, st.sampled_from(KINDS))
def test_weights_keep_to_the_documented_bounds(log_ratios, kind):
    ones = torch.ones(1, len(log_ratios), dtype=torch.float64)
    log_ratio = masked_log_ratio(torch.tensor([log_ratios], dtype=torch.float64), torch.zeros_like(ones), ones.bool())
    ratio = log_ratio.exp()
    weights = correction_weights(kind, log_ratio, ones, (0.5, 5.0))
    kept = weights > 0
    assert torch.isfinite(weights).all()
    if kind in ("tis", "sequence_reject"):
        assert torch.equal(weights[kept], ratio.clamp(max=2.0)[kept])
    else:
        assert torch.equal(weights[kept], ratio[kept])
    if kind == "icepop":
        assert torch.equal(kept, (ratio >= 0.5) & (ratio <= 5.0))
    elif kind == "sequence_reject":
        mean = ratio.log().mean().exp().item()
        assert kept.all() or not 0.5 + 1e-9 < mean < 5 - 1e-9
        assert not kept.any() or 0.5 - 1e-9 < mean < 5 + 1e-9
    else:
        assert kept.all()
