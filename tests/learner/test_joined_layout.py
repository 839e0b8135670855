"""The learner's weights as slices of the engine's: byte for byte, and without a copy."""

import pytest
import torch
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM

from benchmarks.gpu.joined_layout import join, rows_of, separate


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def weights(request, tmp_path):
    folder = save_tiny_model(tmp_path / "model", request.param)
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict())


def test_what_is_joined_and_separated_is_the_same_by_name_and_byte(weights):
    found = separate(join(weights), rows_of(weights))
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(found[name].view(torch.int16), weight.view(torch.int16)), name


def test_parts_are_contiguous_views_of_one_memory(weights):
    joined = join(weights)
    found = separate(joined, rows_of(weights))
    for name, weight in found.items():
        assert weight.is_contiguous(), name
    whole = joined["model.layers.1.self_attn.qkv_proj.weight"]
    found["model.layers.1.self_attn.v_proj.weight"][-1, -1] = 7.0
    assert whole[-1, -1] == 7.0


def test_queries_keys_and_values_stand_in_this_order(weights):
    """4 heads of queries and 2 of keys and values, 8 wide; an MLP of 48."""
    joined = join(weights)
    prefix = "model.layers.0."
    assert joined[f"{prefix}self_attn.qkv_proj.weight"].shape == (32 + 16 + 16, 32)
    assert torch.equal(joined[f"{prefix}self_attn.qkv_proj.weight"][32:48], weights[f"{prefix}self_attn.k_proj.weight"])
    assert torch.equal(joined[f"{prefix}mlp.gate_up_proj.weight"][48:], weights[f"{prefix}mlp.up_proj.weight"])
    assert not [name for name in joined if "q_proj" in name or "gate_proj" in name]


def test_biases_are_joined_as_the_weights_are():
    weights = {f"layers.0.self_attn.{part}_proj.bias": torch.arange(3) + 10 * place for place, part in enumerate("qkv")}
    assert join(weights)["layers.0.self_attn.qkv_proj.bias"].tolist() == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert separate(join(weights), rows_of(weights)).keys() == weights.keys()


def test_a_part_that_is_missing_is_named():
    with pytest.raises(KeyError, match="k_proj"):
        join({"layers.0.self_attn.q_proj.weight": torch.zeros(2, 2)})
