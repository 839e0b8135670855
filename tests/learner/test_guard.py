import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import make_learner, sample, save_tiny_model

from configs.learner import CorrectionConfig, GuardConfig
from learner.batching import build_batch
from learner.guard import age_sums

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def learner(model_path):
    return make_learner(
        model_path, off_policy=True, guard=GuardConfig(), learning_rate=1e-2, correction=CorrectionConfig(kind="tis")
    )


def sampled_by(learner, *, gap=0.0, age=0):
    """Two trajectories of four trained tokens each, whose sampler was off by `gap` from the learner."""
    samples = [
        sample([*PROMPT, 10, 11, 12, 1], [4, 5, 6, 7], advantage=1.0, age=age, name="a"),
        sample([*PROMPT, 20, 21, 22, 1], [4, 5, 6, 7], advantage=-1.0, age=age, name="b"),
    ]
    exact = learner.policy.logprobs(samples).detach().numpy()
    return [
        replace(one, rollout_logprobs=np.where(one.loss_mask, row - np.float32(gap), np.float32(0)))
        for one, row in zip(samples, exact, strict=True)
    ]


def train(learner, samples):
    return learner.train_step(build_batch(samples, microbatch_tokens=1000))


def with_logprob(one, position, value):
    logprobs = one.rollout_logprobs.copy()
    logprobs[position] = value
    return replace(one, rollout_logprobs=logprobs)


def test_step_on_healthy_samples_is_taken_and_says_nothing(learner):
    before = learner.adapter().digest
    result = train(learner, sampled_by(learner))
    assert result.skipped is None
    assert result.metrics["policy/skipped"] == 0.0
    assert learner.adapter().digest != before


def with_a_nan(learner):
    first, second = sampled_by(learner)
    return [with_logprob(first, 4, math.nan), second]


def from_other_weights(learner):
    return sampled_by(learner, gap=1.0)


def decided_by_one_token(learner):
    """Seven weights of e^-6 and one of 2: the share is (2 + 7 e^-6)^2 / (8 (4 + 7 e^-12)) = 0.127."""
    first, second = sampled_by(learner, gap=-6.0, age=1)
    return [with_logprob(first, 4, -30.0), second]


@pytest.mark.parametrize(
    ("poisoned", "sentence"),
    [
        (with_a_nan, "policy/loss must be finite, it is nan; look for"),
        # k3 at a log ratio of 1 is e - 2
        (
            from_other_weights,
            "policy/mismatch_k3_age0 = 0.718 is above learner.guard.max_mismatch_k3_age0 = 0.05; engine",
        ),
        (
            decided_by_one_token,
            "policy/effective_sample_size = 0.127 is below learner.guard.min_effective_sample_share = 0.3;",
        ),
    ],
)
def test_poisoned_batch_is_skipped_with_a_reason_and_leaves_every_bit_of_weights_and_optimizer(
    learner, poisoned, sentence
):
    train(learner, sampled_by(learner))
    digest, moments = learner.adapter().digest, optimizer_tensors(learner)
    result = train(learner, poisoned(learner))
    assert learner.adapter().digest == digest
    assert all(torch.equal(now, then) for now, then in zip(optimizer_tensors(learner), moments, strict=True))
    assert all(parameter.grad is None for parameter in learner.policy.trainable_parameters())
    assert (result.policy_version, result.metrics["policy/skipped"]) == (2, 1.0)
    assert result.skipped.startswith(f"step skipped: {sentence}")


def optimizer_tensors(learner):
    return [value.clone() for state in learner.optimizer.state_dict()["state"].values() for value in state.values()]


def test_the_step_after_a_skipped_one_is_the_one_that_would_have_been_taken_then(learner, model_path):
    other = make_learner(model_path, off_policy=True, learning_rate=1e-2)
    samples = sampled_by(learner)
    train(learner, [with_logprob(samples[0], 4, math.nan)])
    for one in (learner, other):
        train(one, samples)
    assert learner.adapter().digest == other.adapter().digest


def test_schedule_goes_on_over_a_skipped_step(learner):
    learner.reset_optimizer(1e-2, warmup_steps=4)
    samples = sampled_by(learner)
    train(learner, [with_logprob(samples[0], 4, math.nan)])
    train(learner, samples)
    assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 2 / 4)


def test_mismatch_of_stale_tokens_does_not_skip_a_step(learner):
    result = train(learner, sampled_by(learner, gap=1.0, age=2))
    assert result.skipped is None
    assert result.metrics["policy/mismatch_k3_stale"] == pytest.approx(math.e - 2, abs=1e-4)
    assert "policy/mismatch_k3_age0" not in result.metrics


def test_synchronous_learner_is_guarded_too(model_path):
    learner = make_learner(model_path, guard=GuardConfig())
    result = train(learner, sampled_by(learner, gap=1.0))
    assert "max_mismatch_k3_age0" in result.skipped


def test_metrics_are_split_by_the_age_of_tokens(learner):
    """One trajectory of age 0 without a gap; one of age 2 whose sampler was off by log 2 at one of four tokens."""
    fresh, stale = sampled_by(learner)
    fresh = replace(fresh, ages=np.where(fresh.loss_mask, 0, -1))
    stale = replace(
        with_logprob(stale, 4, stale.rollout_logprobs[4] - math.log(2)),
        ages=np.where(stale.loss_mask, 2, -1),
        num_masked_tokens=2,
    )
    metrics = train(learner, [fresh, stale]).metrics
    # k3 at a log ratio of log 2 is 2 - log 2 - 1; the weights are 1 1 1 1 and 2 1 1 1
    k3 = 1 - math.log(2)
    expected = {
        "mismatch_k3_age0": 0.0,
        "mismatch_k3_stale": k3 / 4,
        "mismatch_k3": k3 / 8,
        "effective_sample_size": 9**2 / (8 * 11),
        "effective_sample_size_stale": 5**2 / (4 * 7),
        "age_mean": 1.0,
        "staleness_max": 2.0,
        "correction_masked_share": 0.0,
        "stale_masked_share": 2 / 10,
        "ratio": 1.0,
        "logprob_gap_abs": math.log(2) / 8,
    }
    assert {name: metrics[f"policy/{name}"] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_ages_are_summed_over_loss_tokens_only_and_broken_log_probs_outside_them_do_not_show():
    learner = torch.tensor([[-1.0, -2.0, -math.inf]])
    rollout = torch.tensor([[-1.0, -2.0 - math.log(2), math.nan]])
    weights, mask = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[1, 1, 0]])
    sums = age_sums(learner, rollout, weights, mask, torch.tensor([[0, 3, 99]]))
    assert sums == pytest.approx(
        {
            "age": 3,
            "tokens_age0": 1,
            "tokens_stale": 1,
            "mismatch_k3_age0": 0,
            "mismatch_k3_stale": 1 - math.log(2),
            "weight_stale": 2,
            "weight_squared_stale": 4,
        },
        abs=1e-6,
    )


def test_imitation_with_a_gradient_that_is_not_finite_is_an_error(learner):
    with torch.no_grad():
        learner.policy.trainable_parameters()[0][0, 0] = math.nan
    with pytest.raises(RuntimeError, match="must be finite, it is nan"):
        learner.imitate_step(sampled_by(learner))
