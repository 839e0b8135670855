import json
import shutil

import pytest
import torch
from tiny_export import load_model, random_adapter, save_tiny_export_model, with_adapter

from configs.errors import UserError
from rollout.chat import reply_ends
from rollout.engines.adapters import write_merged_model

MERGED = {"rank": 4, "alpha": 8.0, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_export_model(tmp_path_factory.mktemp("model") / "m", "llama")


@pytest.fixture(scope="module")
def adapter(model_path):
    return random_adapter(model_path)


@pytest.mark.parametrize(("dtype", "scale", "near"), [("bfloat16", 0.1, 1 / 256), ("float32", 0.003, 1e-6)])
def test_merged_weights_are_those_that_peft_itself_would_write(model_path, tmp_path, dtype, scale, near):
    """A step of RL moves most weights by less than bfloat16, which keeps 8 bits, can tell."""
    step = random_adapter(model_path, scale=scale)
    write_merged_model(model_path, step, tmp_path / "hf", **MERGED | {"dtype": dtype})
    expected = with_adapter(load_model(model_path), adapter=step).merge_and_unload().state_dict()
    merged, untouched = load_model(tmp_path / "hf").state_dict(), load_model(model_path).state_dict()
    for name, weight in merged.items():
        assert torch.allclose(weight, expected[name], rtol=near, atol=near / 256), name
    if dtype == "float32":
        moved = {name for name, weight in merged.items() if not weight.equal(untouched[name])}
        assert moved == {name for name in expected if "_proj" in name}


def test_an_export_bends_no_distribution_by_the_base_s_sampling_defaults(model_path, adapter, tmp_path):
    """Qwen2.5's: a server would take them up."""
    bent = shutil.copytree(model_path, tmp_path / "base")
    said = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    ends = {"bos_token_id": 1, "eos_token_id": [0, 2], "pad_token_id": 0, "transformers_version": "4.37.0"}
    (bent / "generation_config.json").write_text(json.dumps(said | ends))
    write_merged_model(bent, adapter, tmp_path / "hf", **MERGED)
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()) == ends


@pytest.mark.parametrize("named_in", ["generation_config.json", "config.json"])
def test_an_export_ends_replies_as_training_does(tmp_path, named_in):
    """A base model whose files name <|endoftext|>, tuned with a chat template that ends turns with <|im_end|>."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = save_tiny_export_model(tmp_path / "base", "qwen2", eos_token_id=0, bos_token_id=0)
    if named_in == "config.json":
        (model / "generation_config.json").unlink()
    write_merged_model(model, random_adapter(model), tmp_path / "hf", **MERGED)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").generation_config.eos_token_id == [0, 2]
    assert reply_ends(tmp_path / "hf", AutoTokenizer.from_pretrained(tmp_path / "hf")) == [0, 2]


def test_an_adapter_of_another_rank_or_model_is_refused_before_anything_is_written(model_path, adapter, tmp_path):
    other = random_adapter(save_tiny_export_model(tmp_path / "other", "llama", num_hidden_layers=3))
    for data, rank, named in ((adapter, 16, r"model\.lora_rank"), (other, 4, "base model lacks")):
        with pytest.raises(UserError, match=named):
            write_merged_model(model_path, data, tmp_path / "hf", **MERGED | {"rank": rank})
        assert not (tmp_path / "hf").exists()
