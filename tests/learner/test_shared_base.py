"""A learner whose base weights another process holds: the same numbers, and no copy."""

import pytest
from tiny import make_learner, make_samples, save_tiny_model

from learner.packing import build_batch
from rollout.engines.base_weights import BaseWeights


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def model(request, tmp_path):
    return save_tiny_model(tmp_path / "model", request.param)


@pytest.fixture(params=["float32", "bfloat16"])
def precision(request):
    return request.param


@pytest.fixture
def held(model, precision):
    base = BaseWeights(model, device="cpu", precision=precision)
    yield base
    base.close()


def test_a_train_step_on_the_shared_base_ends_with_the_same_bytes(model, precision, held):
    own = make_learner(model, dtype=precision)
    shared = make_learner(model, dtype=precision, base_weights=held.export().parts())
    batch = build_batch(make_samples(), microbatch_tokens=64)
    for _ in range(2):
        assert own.train_step(batch).metrics["policy/loss"] == shared.train_step(batch).metrics["policy/loss"]
    assert own.adapter().data == shared.adapter().data


def test_the_learner_reads_the_holders_memory(model, precision, held):
    weights = held.export().parts()
    learner = make_learner(model, dtype=precision, base_weights=weights)
    places = {name: weight.data_ptr() for name, weight in weights.items()}
    (layer, *_) = learner.policy.decoder.layers
    assert layer.self_attn.k_proj.base_layer.weight.data_ptr() == places["model.layers.0.self_attn.k_proj.weight"]
    assert layer.mlp.up_proj.base_layer.weight.data_ptr() == places["model.layers.0.mlp.up_proj.weight"]
    assert learner.policy.head_weight.data_ptr() == places["model.embed_tokens.weight"]


def test_weights_of_another_model_are_refused_in_one_line(model, held):
    weights = held.export().parts()
    weights.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"lack \['model\.norm\.weight'\].*card\.share_base=false"):
        make_learner(model, base_weights=weights)
