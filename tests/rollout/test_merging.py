import json

import pytest
import safetensors.torch
import torch

from rollout.engines.adapters import AdapterMerger

STEM = "base_model.model.model.layers.0"


@pytest.fixture
def model(tmp_path):
    """Write two weights and a norm into two files, and their index."""
    folder = tmp_path / "model"
    folder.mkdir()
    files = {
        "a": {"model.layers.0.q_proj.weight": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])},
        "b": {"model.layers.0.up_proj.weight": torch.ones(2, 2), "model.norm.weight": torch.ones(3)},
    }
    for name, tensors in files.items():
        as_stored = {key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}
        safetensors.torch.save_file(as_stored, folder / f"{name}.safetensors")
    index = {"weight_map": {key: f"{name}.safetensors" for name, tensors in files.items() for key in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def adapter(**factors):
    return safetensors.torch.save(
        {f"{STEM}.{name.replace('__', '.lora_')}.weight": torch.tensor(rows) for name, rows in factors.items()}
    )


def query_adapter():
    """Return an adapter of rank 1, whose B A is [[2, 4, 6], [-1, -2, -3]]."""
    return adapter(q_proj__A=[[1.0, 2.0, 3.0]], q_proj__B=[[2.0], [-1.0]])


def test_merged_weight_is_base_plus_scaled_product_of_the_factors(model):
    merged = dict(AdapterMerger(model, scale=0.5).merged_weights(query_adapter()))
    # [[1, 2, 3], [4, 5, 6]] + 0.5 * [[2, 4, 6], [-1, -2, -3]]
    assert merged["model.layers.0.q_proj.weight"].tolist() == [[2.0, 4.0, 6.0], [3.5, 4.0, 4.5]]
    assert merged["model.layers.0.q_proj.weight"].dtype == torch.bfloat16


def test_merging_in_float32_keeps_a_step_that_bfloat16_would_lose(model):
    # 1 + 2^-9 is 1 in bfloat16.
    step = adapter(q_proj__A=[[2.0**-9, 0.0, 0.0]], q_proj__B=[[2.0], [0.0]])
    exact = dict(AdapterMerger(model, scale=0.5, dtype="float32").merged_weights(step))
    assert exact["model.layers.0.q_proj.weight"].tolist() == [[1 + 2.0**-9, 2.0, 3.0], [4.0, 5.0, 6.0]]
    rounded = dict(AdapterMerger(model, scale=0.5).merged_weights(step))
    assert rounded["model.layers.0.q_proj.weight"].tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


@pytest.mark.parametrize(
    "data",
    [
        adapter(q_proj__A=[[1.0, 2.0, 3.0]]),
        adapter(q_proj__B=[[2.0], [-1.0]]),
        adapter(v_proj__A=[[1.0]], v_proj__B=[[1.0]]),
        safetensors.torch.save({"model.layers.0.q_proj.weight": torch.ones(2, 3)}),
        adapter(q_proj__A=[[1.0, 2.0]], q_proj__B=[[2.0], [-1.0]]),
        adapter(q_proj__A=[[1.0, 2.0, 3.0]], q_proj__B=[[2.0, 1.0], [-1.0, 1.0]]),
        adapter(q_proj__A=[1.0, 2.0, 3.0], q_proj__B=[2.0, -1.0]),
        safetensors.torch.save({}),
        query_adapter()[:50],
        b"",
    ],
)
def test_adapter_that_does_not_fit_is_refused_before_the_first_weight(model, tmp_path, data):
    merger = AdapterMerger(model, scale=0.5)
    with pytest.raises(ValueError, match="adapter"):
        merger.merged_weights(data)
    with pytest.raises(ValueError, match="adapter"):
        merger.write_adapter_folder(tmp_path / "adapter", data)
    assert not (tmp_path / "adapter").exists()


def test_adapter_folder_is_what_peft_reads(model, tmp_path):
    folder = tmp_path / "v3"
    AdapterMerger(model, scale=2.0).write_adapter_folder(folder, query_adapter())
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (1, 2.0, ["q_proj"])
    assert (folder / "adapter_model.safetensors").read_bytes() == query_adapter()
