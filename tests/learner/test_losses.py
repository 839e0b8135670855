import json
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import loss_inputs

from learner.losses import cispo_loss, dapo_loss, dr_grpo_loss, flow_grpo_loss, grpo_loss, gspo_loss, reference_k3

GOLDEN = Path(__file__).parents[1] / "golden" / "values.json"
# ratios 1.5 0.9 1.1 / 0.7 1.3 (1.0 masked), advantages +1 / -1
OLD = torch.tensor([[-1.0, -0.5, -2.0], [-0.3, -1.2, -0.7]], dtype=torch.float64)
RATIO = torch.tensor([[1.5, 0.9, 1.1], [0.7, 1.3, 1.0]], dtype=torch.float64)
NEW = OLD + RATIO.log()
ADVANTAGES = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)


MEANS = (1.5 * 0.9 * 1.1) ** (1 / 3), (0.7 * 1.3) ** 0.5
"""Geometric means of the ratios, 1.14 and 0.95."""


@pytest.mark.parametrize(
    ("loss", "value", "gradient", "clipped"),
    [
        (dapo_loss, (-1.28 - 0.9 - 1.1 + 0.8 + 1.3) / 5, [[0.0, -0.18, -0.22], [0.0, 0.26, 0.0]], (1, 1)),
        # Averaged over each trajectory first.
        (
            grpo_loss,
            ((-1.2 - 0.9 - 1.1) / 3 + (0.8 + 1.3) / 2) / 2,
            [[0.0, -0.9 / 6, -1.1 / 6], [0.0, 1.3 / 4, 0.0]],
            (1, 1),
        ),
        # Weights are min(r, 1.2), and no token is clipped out of the gradient.
        (
            partial(cispo_loss, max_weight=1.2),
            (-1.2 - 0.9 - 1.1 + 0.7 + 1.2) / 5,
            [[-0.24, -0.18, -0.22], [0.14, 0.24, 0.0]],
            (2, 0),
        ),
        # A trajectory has the weight of its mean, and is clipped as a whole.
        (
            partial(gspo_loss, clip_low=0.2, clip_high=0.28),
            (MEANS[1] - MEANS[0]) / 2,
            [[-MEANS[0] / 6] * 3, [MEANS[1] / 4, MEANS[1] / 4, 0.0]],
            (0, 0),
        ),
        (partial(gspo_loss, clip_low=0.04, clip_high=0.1), (-1.1 + 0.96) / 2, [[0.0] * 3] * 2, (3, 2)),
        # Every trajectory's sum over the same constant.
        (
            partial(dr_grpo_loss, length=10),
            ((-1.2 - 0.9 - 1.1) + (0.8 + 1.3)) / 2 / 10,
            [[0.0, -0.045, -0.055], [0.0, 0.065, 0.0]],
            (1, 1),
        ),
    ],
    ids=["dapo", "grpo", "cispo", "gspo", "gspo, clipped", "dr_grpo"],
)
def test_losses_and_gradients_match_the_examples_computed_by_hand(loss, value, gradient, clipped):
    new = NEW.clone().requires_grad_()
    output = loss(loss_inputs(new, OLD, ADVANTAGES, MASK))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(value, abs=1e-9)
    assert torch.allclose(new.grad, torch.tensor(gradient, dtype=torch.float64), atol=1e-9)
    assert (output.metrics["clip_high"], output.metrics["clip_low"]) == clipped


def test_k3_matches_golden_values_and_gradient():
    golden = json.loads(GOLDEN.read_text())["kl_tokens"]
    logp = torch.tensor(golden["logp"], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor(golden["ref_logp"], dtype=torch.float64)
    k3 = reference_k3(logp, ref, torch.ones_like(ref))
    k3.sum().backward()
    assert k3.tolist() == pytest.approx(golden["k3"], abs=1e-9)
    assert logp.grad.tolist() == pytest.approx(golden["dk3_dlogp"], abs=1e-9)


def test_flow_grpo_weighs_trajectories_turns_and_tokens_in_that_order():
    learner = torch.zeros(2, 4)
    advantages = torch.tensor([[1.0, 2.0, 4.0, 9.0], [8.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    turns = torch.tensor([[0, 0, 1, -1], [0, -1, -1, -1]])
    output = flow_grpo_loss(loss_inputs(learner, learner, advantages, mask, turn_ids=turns))
    # row 1: ((1 + 2) / 2 + 4) / 2 = 2.75; row 2: 8; mean 5.375
    assert output.loss.item() == pytest.approx(-5.375)


def test_flow_grpo_adds_the_weighted_k3_divergence():
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2)
    reference = torch.tensor([[0.5, -0.5]])
    output = flow_grpo_loss(loss_inputs(zeros, zeros, zeros, mask, ref_logprobs=reference), kl_weight=0.1)
    # k3 = e^0.5 - 1.5 and e^-0.5 - 0.5
    assert output.loss.item() == pytest.approx(0.1 * (0.1487213 + 0.1065307) / 2, abs=1e-6)


@pytest.mark.parametrize("gap", [-30.0, -2.0, 2.0, 30.0])
def test_one_token_adds_at_most_ten_times_the_kl_weight(gap):
    learner = torch.zeros(1, 1, requires_grad=True)
    mask = torch.ones(1, 1)
    inputs = loss_inputs(learner, learner.detach(), mask * 0, mask, ref_logprobs=mask * gap)
    output = flow_grpo_loss(inputs, kl_weight=0.1)
    output.loss.backward()
    assert 0 < output.loss.item() <= 1
    assert (learner.grad.item() == 0) == (abs(gap) == 30)


def test_as_a_loss_k3_estimates_one_kl_divergence_and_has_the_gradient_of_the_other():
    """Exactly: the mean over all tokens of a small vocabulary, each as often as the learner samples it."""
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    learner, ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    loss = (learner.exp().detach() * reference_k3(learner, ref, torch.ones_like(ref))).sum()
    assert loss.item() == pytest.approx((learner.exp() * (learner - ref)).sum().item())
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (expected,) = torch.autograd.grad((ref.exp() * (ref - learner)).sum(), logits)
    assert torch.allclose(gradient, expected)
