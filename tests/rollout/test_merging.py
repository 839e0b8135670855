import json

import pytest
import safetensors.torch
import torch

from rollout.engines.adapters import AdapterMerger

STEM = "base_model.model.model.layers.0"


@pytest.fixture
def model(tmp_path):
    """Two weights and a norm, in two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    files = {
        "a": {"model.layers.0.q_proj.weight": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])},
        "b": {"model.layers.0.up_proj.weight": torch.ones(2, 2), "model.norm.weight": torch.ones(3)},
    }
    for name, tensors in files.items():
        as_stored = {key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}
        safetensors.torch.save_file(as_stored, folder / f"{name}.safetensors")
    return folder


def adapter(**factors):
    return safetensors.torch.save(
        {f"{STEM}.{name.replace('__', '.lora_')}.weight": torch.tensor(rows) for name, rows in factors.items()}
    )


def query_adapter():
    """Rank 1: B A is [[2, 4, 6], [-1, -2, -3]]."""
    return adapter(q_proj__A=[[1.0, 2.0, 3.0]], q_proj__B=[[2.0], [-1.0]])


def test_merged_weight_is_the_base_weight_and_scale_times_the_product_of_the_factors(model):
    merged = dict(AdapterMerger(model, scale=0.5).merged_weights(query_adapter()))
    # [[1, 2, 3], [4, 5, 6]] + 0.5 * [[2, 4, 6], [-1, -2, -3]]
    assert merged["model.layers.0.q_proj.weight"].tolist() == [[2.0, 4.0, 6.0], [3.5, 4.0, 4.5]]
    assert merged["model.layers.0.q_proj.weight"].dtype == torch.bfloat16


def test_engine_in_float32_gets_what_the_files_type_would_round_away(model):
    # A first step of RL moves a weight by less than bfloat16 can tell: 1 + 2^-9 is 1 in it.
    step = adapter(q_proj__A=[[2.0**-9, 0.0, 0.0]], q_proj__B=[[2.0], [0.0]])
    exact = dict(AdapterMerger(model, scale=0.5, dtype="float32").merged_weights(step))
    assert exact["model.layers.0.q_proj.weight"].tolist() == [[1 + 2.0**-9, 2.0, 3.0], [4.0, 5.0, 6.0]]
    rounded = dict(AdapterMerger(model, scale=0.5).merged_weights(step))
    assert rounded["model.layers.0.q_proj.weight"].tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_weights_without_factors_are_those_of_the_base_model(model):
    merger = AdapterMerger(model, scale=0.5)
    base, merged = dict(merger.base_weights()), dict(merger.merged_weights(query_adapter()))
    assert (
        merged.keys()
        == base.keys()
        == {"model.layers.0.q_proj.weight", "model.layers.0.up_proj.weight", "model.norm.weight"}
    )
    for name in base.keys() - {"model.layers.0.q_proj.weight"}:
        assert torch.equal(merged[name], base[name])


def test_every_version_is_computed_from_the_untouched_base(model):
    merger = AdapterMerger(model, scale=0.5)
    first = dict(merger.merged_weights(query_adapter()))
    dict(merger.merged_weights(adapter(q_proj__A=[[0.1, 0.1, 0.1]], q_proj__B=[[9.0], [7.0]])))
    again = dict(merger.merged_weights(query_adapter()))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (adapter(q_proj__A=[[1.0, 2.0, 3.0]]), r"the adapter lacks \['base_model.model.model.layers.0.q_proj.lora_B"),
        (adapter(q_proj__B=[[2.0], [-1.0]]), r"the adapter lacks \['base_model.model.model.layers.0.q_proj.lora_A"),
        (adapter(v_proj__A=[[1.0]], v_proj__B=[[1.0]]), r"the base model lacks: \['base_model.model.*v_proj'\]"),
        (safetensors.torch.save({"model.layers.0.q_proj.weight": torch.ones(2, 3)}), "the adapter lacks"),
        (query_adapter()[:50], "these bytes are no adapter"),
        (b"", "these bytes are no adapter"),
    ],
)
def test_adapter_that_does_not_fit_is_refused_before_the_first_weight(model, tmp_path, data, complaint):
    merger = AdapterMerger(model, scale=0.5)
    with pytest.raises(ValueError, match=complaint):
        merger.merged_weights(data)
    with pytest.raises(ValueError, match=complaint):
        merger.write_adapter_folder(tmp_path / "adapter", data)
    assert not (tmp_path / "adapter").exists()


def test_adapter_folder_is_what_peft_reads(model, tmp_path):
    folder = tmp_path / "v3"
    AdapterMerger(model, scale=2.0).write_adapter_folder(folder, query_adapter())
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (1, 2.0, ["q_proj"])
    assert (folder / "adapter_model.safetensors").read_bytes() == query_adapter()


@pytest.mark.parametrize(
    ("bytes_of", "said"),
    [
        (adapter(other_proj__A=[[1.0]], other_proj__B=[[1.0]]), "has weights the base model lacks"),
        (adapter(q_proj__A=[[1.0] * 3] * 2, q_proj__B=[[1.0] * 2] * 2), r"its rank is \[2\], .* model.lora_rank = 1"),
        (
            adapter(q_proj__A=[[1.0] * 4], q_proj__B=[[1.0]] * 2),
            r"has the shape \[2, 3\] .* and \[2, 4\]",
        ),
        (b"no adapter", "these bytes are no adapter"),
    ],
)
def test_an_adapter_of_another_model_or_rank_is_found_without_merging(model, bytes_of, said):
    with pytest.raises(ValueError, match=said):
        AdapterMerger(model, scale=0.5).check(bytes_of, rank=1)
    AdapterMerger(model, scale=0.5).check(query_adapter(), rank=1)
