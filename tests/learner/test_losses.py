import json
from pathlib import Path

import pytest
import torch
from tiny import loss_inputs

from learner.losses import (
    cispo_loss,
    dapo_loss,
    dr_grpo_loss,
    flow_grpo_loss,
    grpo_loss,
    gspo_loss,
    reference_k3,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "values.json"
# ratios 1.5 0.9 1.1 / 0.7 1.3 (1.0 masked), advantages +1 / -1
OLD = torch.tensor([[-1.0, -0.5, -2.0], [-0.3, -1.2, -0.7]], dtype=torch.float64)
RATIO = torch.tensor([[1.5, 0.9, 1.1], [0.7, 1.3, 1.0]], dtype=torch.float64)
NEW = OLD + RATIO.log()
ADVANTAGES = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)


def test_dapo_loss_and_gradient_match_the_hand_computed_example():
    new = NEW.clone().requires_grad_()
    output = dapo_loss(loss_inputs(new, OLD, ADVANTAGES, MASK))
    output.loss.backward()
    # (-1.28 - 0.9 - 1.1 + 0.8 + 1.3) / 5
    assert output.loss.item() == pytest.approx(-0.236, abs=1e-9)
    expected = torch.tensor([[0.0, -0.18, -0.22], [0.0, 0.26, 0.0]], dtype=torch.float64)
    assert torch.allclose(new.grad, expected, atol=1e-9)
    assert (output.metrics["clip_high"], output.metrics["clip_low"]) == (1, 1)


def test_grpo_loss_averages_each_trajectory_first():
    output = grpo_loss(loss_inputs(NEW, OLD, ADVANTAGES, MASK))
    # ((-1.2 - 0.9 - 1.1) / 3 + (0.8 + 1.3) / 2) / 2
    assert output.loss.item() == pytest.approx(-0.0083333333333, abs=1e-9)


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


def test_cispo_bounds_every_weight_and_clips_no_token_out_of_the_gradient():
    new = NEW.clone().requires_grad_()
    output = cispo_loss(loss_inputs(new, OLD, ADVANTAGES, MASK), max_weight=1.2)
    output.loss.backward()
    # weights min(r, 1.2): 1.2 0.9 1.1 / 0.7 1.2; the gradient of a token is -weight * advantage / 5
    assert output.loss.item() == pytest.approx((-1.2 - 0.9 - 1.1 + 0.7 + 1.2) / 5, abs=1e-9)
    expected = torch.tensor([[-0.24, -0.18, -0.22], [0.14, 0.24, 0.0]], dtype=torch.float64)
    assert torch.allclose(new.grad, expected, atol=1e-9)
    assert (output.metrics["clip_high"], output.metrics["clip_low"]) == (2, 0)


def test_gspo_weighs_a_trajectory_by_the_geometric_mean_of_its_ratios():
    new = NEW.clone().requires_grad_()
    output = gspo_loss(loss_inputs(new, OLD, ADVANTAGES, MASK), clip_low=0.2, clip_high=0.28)
    output.loss.backward()
    first, second = (1.5 * 0.9 * 1.1) ** (1 / 3), (0.7 * 1.3) ** 0.5
    # 1.14 and 0.95, both inside: (-1.14 + 0.95) / 2; a token's gradient is its row's, over the row's length and 2
    assert output.loss.item() == pytest.approx((-first + second) / 2, abs=1e-9)
    expected = torch.tensor([[-first / 6] * 3, [second / 4, second / 4, 0.0]], dtype=torch.float64)
    assert torch.allclose(new.grad, expected, atol=1e-9)
    assert (output.metrics["clip_high"], output.metrics["clip_low"]) == (0, 0)


def test_gspo_clips_a_whole_trajectory_or_nothing_of_it():
    new = NEW.clone().requires_grad_()
    output = gspo_loss(loss_inputs(new, OLD, ADVANTAGES, MASK), clip_low=0.04, clip_high=0.1)
    output.loss.backward()
    # 1.14 > 1.1 with a positive advantage, 0.954 < 0.96 with a negative one
    assert output.loss.item() == pytest.approx((-1.1 + 0.96) / 2, abs=1e-9)
    assert not new.grad.any()
    assert (output.metrics["clip_high"], output.metrics["clip_low"]) == (3, 2)


def test_dr_grpo_divides_every_trajectorys_sum_by_the_same_constant():
    new = NEW.clone().requires_grad_()
    output = dr_grpo_loss(loss_inputs(new, OLD, ADVANTAGES, MASK), length=10)
    output.loss.backward()
    # ((-1.2 - 0.9 - 1.1) + (0.8 + 1.3)) / 2 / 10; the clipped tokens 1.5 and 0.7 have no gradient
    assert output.loss.item() == pytest.approx(-0.055, abs=1e-9)
    expected = torch.tensor([[0.0, -0.045, -0.055], [0.0, 0.065, 0.0]], dtype=torch.float64)
    assert torch.allclose(new.grad, expected, atol=1e-9)
