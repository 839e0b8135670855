"""The shared base weights equal the model's byte for byte, in the engine's layout and in the learner's."""

import pytest
import torch
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM

from rollout.engines.base_weights import BaseWeights


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def model(request, tmp_path):
    return save_tiny_model(tmp_path / "model", request.param)


@pytest.fixture
def base(model):
    held = BaseWeights(model, device="cpu", precision="bfloat16")
    yield held
    held.close()


@pytest.fixture
def weights(model):
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    return dict(found.named_parameters())


def test_parts_equal_the_models_weights_and_are_joined_in_vllms_order(base, weights):
    """4 heads of queries and 2 of keys and values, 8 wide; an MLP of 48."""
    found, joined, prefix = base.export().parts(), base.export().joined(), "model.layers.0."
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(found[name].view(torch.int16), weight.view(torch.int16)), name
    assert joined[f"{prefix}self_attn.qkv_proj.weight"].shape == (32 + 16 + 16, 32)
    assert torch.equal(joined[f"{prefix}self_attn.qkv_proj.weight"][32:48], weights[f"{prefix}self_attn.k_proj.weight"])
    assert torch.equal(joined[f"{prefix}mlp.gate_up_proj.weight"][48:], weights[f"{prefix}mlp.up_proj.weight"])
    assert not [name for name in joined if "q_proj" in name or "gate_proj" in name]


def test_weights_outlive_the_holder(model, weights):
    base = BaseWeights(model, device="cpu", precision="bfloat16")
    exported = base.export()
    found = exported.parts()
    base.close()
    assert not exported.file.exists()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
