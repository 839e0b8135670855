"""Custom losses by import path."""

import pytest
import torch
from tiny import loss_inputs, make_learner, make_samples, save_tiny_model

from configs.learner import CustomLossConfig
from configs.plugins import OwnCodeError
from learner.losses import policy_loss
from learner.packing import build_batch

LOSSES = """
import torch
from learner.losses import LossOutput, dapo_loss

def dapo(inputs, clip_low=0.2, clip_high=0.28):
    return dapo_loss(inputs, clip_low=clip_low, clip_high=clip_high)

def a_number(inputs):
    return 0.5

def a_row(inputs):
    return LossOutput(loss=inputs.learner_logprobs.sum(-1), metrics={})

def broken(inputs):
    return inputs.no_such_thing

def no_inputs():
    return None

def with_metrics(inputs, kind):
    loss = inputs.learner_logprobs.sum() / inputs.num_loss_tokens
    tensors = {"clip_high": 10 * loss, "loss": loss, "packed_tokens": loss}
    return LossOutput(loss=loss, metrics={"tensors": tensors, "words": {"clip_low": "many"}}.get(kind))

def constant(inputs):
    return LossOutput(loss=torch.tensor(0.5), metrics={})
"""


@pytest.fixture(autouse=True)
def custom_module(tmp_path, monkeypatch):
    (tmp_path / "own_losses_of_the_test.py").write_text(LOSSES)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


def custom(name, **further):
    return {"type": "custom", "function": f"own_losses_of_the_test:{name}", **further}


@pytest.mark.parametrize("settings", [{}, {"clip_low": 0.05, "clip_high": 0.06}])
def test_dapo_under_another_name_gives_identical_adapters(model_path, settings):
    digests = []
    for loss in ({"type": "dapo", **settings}, custom("dapo", settings=settings)):
        learner = make_learner(model_path, loss=loss, learning_rate=1e-2)
        for _ in range(2):
            learner.train_step(build_batch(make_samples(), microbatch_tokens=40))
        digests.append(learner.adapter().digest)
    assert digests[0] == digests[1]


def test_custom_metrics_do_not_replace_the_learners(model_path):
    """Regression: a metric named `loss` was added to the reported loss, and tensors broke the metrics file."""
    learner = make_learner(model_path, loss=custom("with_metrics", settings={"kind": "tensors"}))
    batch = build_batch(make_samples(), microbatch_tokens=16)
    assert len(batch.microbatches) > 1
    expected = sum(float(learner.policy.logprobs(one).sum()) for one in batch.microbatches) / batch.num_loss_tokens
    metrics = learner.train_step(batch).metrics
    assert {type(value) for value in metrics.values()} == {float}
    assert metrics["policy/loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["policy/clip_high"] == pytest.approx(10 * expected / batch.num_loss_tokens, rel=1e-5)
    assert metrics["learner/packed_tokens"] < 40


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(("with_metrics", {"kind": "none"}), ("with_metrics", {"kind": "words"}), ("dapo", {"clop": 1.0})),
        *((name, {}) for name in ("constant", "a_number", "a_row", "broken", "no_inputs", "missing")),
    ],
)
def test_unusable_loss_is_refused_with_its_setting(name, settings):
    ones = torch.ones(1, 3, requires_grad=True)
    config = CustomLossConfig(function=f"own_losses_of_the_test:{name}", settings=settings)
    with pytest.raises(OwnCodeError, match=r"learner\.loss\.function"):
        policy_loss(config)(loss_inputs(ones, ones.detach(), ones.detach(), torch.ones(1, 3)))
