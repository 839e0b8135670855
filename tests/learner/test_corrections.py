import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.learner import CorrectionConfig, CorrectionKind
from learner.corrections import Correction, correction_weights
from learner.losses import dapo_loss, flow_grpo_loss, grpo_loss

KINDS = get_args(CorrectionKind)
WEIGHTED = [kind for kind in KINDS if kind not in ("none", "bypass")]
# Probabilities of the sampled tokens; ratios 6, 0.2, 1 / 0.6, 2.5 (the last is masked), advantages +1 / -1.
ROLLOUT = torch.tensor([[0.1, 0.5, 0.4], [0.75, 0.2, 0.5]], dtype=torch.float64).log()
LEARNER = torch.tensor([[0.6, 0.1, 0.4], [0.45, 0.5, 0.5]], dtype=torch.float64).log()
ADVANTAGES = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
# Five loss tokens whatever is rejected; where r is 1, a token's loss is -w A and its gradient -w A / 5.
EXPECTED = {
    # r is learner / rollout, clipped to [0.8, 1.28]: -1.28 -0.2 -1 +0.8 +2.5, and no gradient where it clips
    "bypass": (0.82, [[0.0, -0.2, -1.0], [0.0, 2.5, 0.0]], 0),
    "none": (0.82, [[0.0, -0.2, -1.0], [0.0, 2.5, 0.0]], 0),
    "decoupled": (-4.1, [[-6.0, -0.2, -1.0], [0.6, 2.5, 0.0]], 0),
    # 6 and 2.5 are truncated to 2
    "tis": (-0.6, [[-2.0, -0.2, -1.0], [0.6, 2.0, 0.0]], 0),
    # 6 and 0.2 are outside [0.5, 5]
    "icepop": (2.1, [[0.0, 0.0, -1.0], [0.6, 2.5, 0.0]], 2),
    # 0.1 -> 0.6 with A > 0 and 0.75 -> 0.45 with A < 0 went too far; 0.5 -> 0.1 and 0.2 -> 0.5 went against A
    "tv_mask": (1.3, [[0.0, -0.2, -1.0], [0.0, 2.5, 0.0]], 2),
    # geometric means (6 x 0.2 x 1)^(1/3) = 1.063 and (0.6 x 2.5)^(1/2) = 1.225, the band ends at 1.2; 6 is truncated
    "sequence_reject": (-3.2, [[-2.0, -0.2, -1.0], [0.0, 0.0, 0.0]], 2),
}
LOSSES = {
    "dapo": lambda *tensors, rows, **options: dapo_loss(*tensors, num_loss_tokens=5, **options),
    "grpo": lambda *tensors, rows, **options: grpo_loss(*tensors, num_trajectories=2, **options),
    "flow_grpo": lambda *tensors, rows, **options: flow_grpo_loss(
        *tensors, num_trajectories=2, ref_logprobs=ROLLOUT[rows], kl_weight=0.1, **options
    ),
}


def make_correction(kind):
    return Correction(kind=kind, low=0.8, high=1.2) if kind == "sequence_reject" else Correction(kind=kind)


def weights_of(correction, ratios, *, advantage=1.0, mask=None):
    """The weights of one row in which the sampler gave every token probability e^-30."""
    rollout = torch.full((1, len(ratios)), -30.0, dtype=torch.float64)
    proximal = rollout + torch.tensor([ratios], dtype=torch.float64).log()
    mask = torch.ones(1, len(ratios), dtype=torch.bool) if mask is None else torch.tensor([mask])
    weights, _ = correction_weights(correction, proximal, rollout, torch.full((1, 1), advantage), mask)
    return weights[0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_of_every_correction_match_the_hand_computed_example(kind):
    learner = LEARNER.clone().requires_grad_()
    output = dapo_loss(learner, ROLLOUT, ADVANTAGES, MASK, num_loss_tokens=5, correction=make_correction(kind))
    output.loss.backward()
    total, gradient, masked = EXPECTED[kind]
    assert output.loss.item() == pytest.approx(total / 5, abs=1e-9)
    assert torch.allclose(learner.grad, torch.tensor(gradient, dtype=torch.float64) / 5, atol=1e-9)
    assert output.metrics["correction_masked"] == masked


def test_correction_may_be_given_by_name_and_an_unknown_name_lists_the_known_ones():
    by_name = dapo_loss(LEARNER, ROLLOUT, ADVANTAGES, MASK, num_loss_tokens=5, correction="tis")
    assert by_name.loss.item() == pytest.approx(-0.6 / 5)
    with pytest.raises(ValueError, match="'tsi' is unknown; use one of none, decoupled, tis, icepop"):
        dapo_loss(LEARNER, ROLLOUT, ADVANTAGES, MASK, num_loss_tokens=5, correction="tsi")


@pytest.mark.parametrize("kind", WEIGHTED)
def test_learner_itself_is_the_proximal_policy_where_none_is_given(kind):
    def gradient_of(**proximal):
        learner = LEARNER.clone().requires_grad_()
        dapo_loss(learner, ROLLOUT, ADVANTAGES, MASK, num_loss_tokens=5, correction=kind, **proximal).loss.backward()
        return learner.grad

    assert torch.equal(gradient_of(), gradient_of(proximal_logprobs=LEARNER))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # w = 1.5 and 8 from proximal / rollout, r = 1.4 (clipped to 1.28) and 1 from learner / proximal
        (None, 1.5 * 1.28 + 8.0),
        ("decoupled", 1.5 * 1.28 + 8.0),
        ("tis", 1.5 * 1.28 + 2.0),
        ("icepop", 1.5 * 1.28),
        ("none", 1.28 + 1.0),
        # r = learner / rollout = 2.1 and 8, both clipped
        ("bypass", 1.28 + 1.28),
    ],
)
def test_clip_is_on_the_update_ratio_only_and_the_weight_comes_from_the_proximal_policy(kind, expected):
    rollout = torch.tensor([[-2.0, -3.0]])
    proximal = rollout + torch.log(torch.tensor([[1.5, 8.0]]))
    learner = proximal + torch.log(torch.tensor([[1.4, 1.0]]))
    ones = torch.ones(1, 2)
    output = dapo_loss(learner, rollout, ones, ones, num_loss_tokens=2, proximal_logprobs=proximal, correction=kind)
    assert output.loss.item() == pytest.approx(-expected / 2)


def test_row_that_is_kept_by_its_mean_still_has_its_weights_truncated():
    """A known bug multiplies the kept rows by the bare exp: the ratio 50 would decide the whole batch."""
    band = Correction(kind="sequence_reject", low=0.9, high=1.1)
    assert weights_of(band, [50.0, 0.02, 1.0]) == pytest.approx([2.0, 0.02, 1.0])


def test_mean_of_a_row_is_over_its_loss_tokens_only():
    band = Correction(kind="sequence_reject", low=0.9, high=1.1)
    assert weights_of(band, [1.0, 1.05, 1000.0], mask=[True, True, False]) == pytest.approx([1.0, 1.05, 0.0])
    assert weights_of(band, [1.0, 1.05, 1000.0]) == [0.0, 0.0, 0.0]


def test_probability_mask_lets_rare_tokens_be_whatever_their_ratio():
    assert weights_of(Correction(kind="tv_mask"), [1000.0]) == pytest.approx([1000.0])
    assert weights_of(Correction(kind="icepop"), [1000.0]) == [0.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("poison", [-math.inf, math.inf, math.nan])
def test_what_stands_outside_the_mask_reaches_neither_loss_nor_gradient_nor_sums(kind, loss, poison):
    def run(learner, rollout, advantages, proximal):
        learner = learner.clone().requires_grad_()
        output = LOSSES[loss](
            learner,
            rollout,
            advantages,
            MASK,
            rows=slice(None),
            proximal_logprobs=proximal,
            correction=make_correction(kind),
        )
        output.loss.backward()
        return output, learner.grad

    advantages = ADVANTAGES.expand(2, 3)
    clean = (LEARNER, ROLLOUT, advantages, LEARNER - 0.1)
    broken = [torch.where(MASK, tensor, poison) for tensor in clean]
    (expected, gradient), (found, found_gradient) = run(*clean), run(*broken)
    assert found.loss.item() == expected.loss.item()
    assert torch.equal(found_gradient, gradient)
    assert found.metrics == expected.metrics


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_one_batch_equals_any_split_into_microbatches(kind, loss):
    def gradient_of(*parts):
        learner = LEARNER.clone().requires_grad_()
        for rows in parts:
            LOSSES[loss](
                learner[rows], ROLLOUT[rows], ADVANTAGES[rows], MASK[rows], rows=rows, correction=make_correction(kind)
            ).loss.backward()
        return learner.grad

    whole = gradient_of(slice(0, 2))
    assert (gradient_of(slice(0, 1), slice(1, 2)) - whole).abs().max() < 1e-6
    assert whole.abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_microbatch_without_loss_tokens_still_goes_backward(kind, loss):
    learner = LEARNER.clone().requires_grad_()
    output = LOSSES[loss](learner, ROLLOUT, ADVANTAGES, torch.zeros_like(MASK), rows=slice(None), correction=kind)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert torch.equal(learner.grad, torch.zeros_like(learner))


@pytest.mark.parametrize("kind", WEIGHTED)
def test_trained_token_whose_log_prob_is_not_a_number_is_noticed_not_dropped(kind):
    rollout = ROLLOUT.clone()
    rollout[0, 0] = math.nan
    assert math.isnan(dapo_loss(LEARNER, rollout, ADVANTAGES, MASK, num_loss_tokens=5, correction=kind).loss.item())


LOG_RATIOS = st.lists(st.floats(-100, 100), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(LOG_RATIOS, st.floats(-30, 0), st.sampled_from([-1.0, 0.0, 1.0]), st.sampled_from(KINDS))
def test_weights_keep_to_the_documented_bounds(log_ratios, rollout_logprob, advantage, kind):
    rollout = torch.full((1, len(log_ratios)), rollout_logprob, dtype=torch.float64)
    proximal = (rollout + torch.tensor([log_ratios], dtype=torch.float64)).clamp(max=0.0)
    ratio = (proximal - rollout).clamp(-20, 20).exp()
    correction = Correction(kind=kind)
    ones = torch.ones_like(rollout)
    weights, sums = correction_weights(correction, proximal, rollout, advantage * ones, ones)
    kept = weights > 0
    assert torch.isfinite(weights).all()
    assert sums["correction_masked"] == len(log_ratios) - kept.sum()
    if kind in ("none", "bypass"):
        assert torch.equal(weights, ones)
    elif kind in ("tis", "sequence_reject"):
        assert torch.equal(weights[kept], ratio.clamp(max=2.0)[kept])
    else:
        assert torch.equal(weights[kept], ratio[kept])
    if kind == "icepop":
        assert torch.equal(kept, (ratio >= 0.5) & (ratio <= 5.0))
    if kind == "tv_mask":
        assert torch.equal(kept, (proximal.exp() - rollout.exp()) * advantage <= 0.2)
    if kind == "sequence_reject":
        mean = ratio.log().mean().exp().item()
        assert kept.all() or not 0.5 + 1e-9 < mean < 5 - 1e-9
        assert not kept.any() or 0.5 - 1e-9 < mean < 5 + 1e-9


@pytest.mark.parametrize(
    "bounds", [{"max_weight": 0.5}, {"low": 1.5}, {"high": 0.9}, {"low": 0.0}, {"max_probability_gap": 0.0}]
)
def test_bounds_that_would_reject_on_policy_tokens_are_refused(bounds):
    with pytest.raises(ValueError, match="must"):
        Correction(kind="icepop", **bounds)


def test_recipe_and_correction_have_the_same_defaults():
    assert Correction(**CorrectionConfig().model_dump()) == Correction(kind="tis")
