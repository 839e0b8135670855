"""The learner's norms and adapted linear layers are those of transformers and PEFT, in fewer operations."""

from collections import Counter

import numpy as np
import pytest
import torch
from tiny import make_learner, make_samples, save_tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from learner import layers, tree_attention
from learner.packing import pack

FAMILIES = ("llama", "qwen2", "qwen3")


class Operations(TorchDispatchMode):
    """Counts the operations that compute or copy, each of which is at least one kernel on a card."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and not any(word in function.name() for word in ("empty", "view")):
            self.counts[function.name()] += 1
        return result


@pytest.fixture(scope="module", params=FAMILIES)
def model_path(request, tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), request.param)


def of_transformers_and_peft(learner):
    for module in learner.policy.model.modules():
        vars(module).pop("forward", None)
    return learner


def states_and_gradient(learner, precision):
    """Return hidden states, and the adapter's gradient of a sum of them with fixed weights."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        hidden = learner.policy.hidden_states(pack(make_samples())).float()
    weights = torch.from_numpy(np.random.default_rng(0).normal(size=hidden.shape)).float()
    (hidden * weights).sum().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in learner.policy.trainable_parameters()])
    return hidden.detach(), gradient


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def test_in_float32_states_and_gradient_are_equal_up_to_rounding(model_path):
    found = states_and_gradient(make_learner(model_path), "float32")
    expected = states_and_gradient(of_transformers_and_peft(make_learner(model_path)), "float32")
    assert max(map(relative, found, expected)) < 1e-5


def test_in_bfloat16_they_are_as_close_to_float32_as_those_of_autocast(model_path):
    exact = states_and_gradient(make_learner(model_path), "float32")
    found = states_and_gradient(make_learner(model_path, dtype="bfloat16"), "bfloat16")
    peft = of_transformers_and_peft(make_learner(model_path, dtype="bfloat16"))
    expected = states_and_gradient(peft, "autocast")
    for ours, theirs, true in zip(found, expected, exact, strict=True):
        assert relative(ours, true) < 1.25 * relative(theirs, true) < 0.1


def operations(folder, num_layers):
    """Return the operations of a pass in bfloat16 with recomputed layers; norms are one, as on a card."""
    learner = make_learner(
        save_tiny_model(folder / f"{num_layers}", "qwen3", num_hidden_layers=num_layers),
        dtype="bfloat16",
        gradient_checkpointing=True,
    )
    with Operations() as operations:
        states_and_gradient(learner, "bfloat16")
    return operations.counts.total()


def product(query, key, value, *_):
    """Return something of the attention's shape that depends on all three."""
    shared = (key * value).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return (query * shared).transpose(1, 2)


def test_a_layer_takes_few_operations(tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "_normed", lambda module, x: x * module.weight)
    monkeypatch.setattr(tree_attention, "_attend_on_cpu", product)
    assert operations(tmp_path, 3) - operations(tmp_path, 2) <= 194
