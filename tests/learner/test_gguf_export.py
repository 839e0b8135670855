import json
import math
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_export import TEMPLATE, load_model, save_tiny_export_model
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from configs.errors import UserError
from ray_jobs.gguf import pre_tokenizer_name, write_gguf


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model_path(request, tmp_path_factory):
    return save_tiny_export_model(tmp_path_factory.mktemp(request.param) / "model", request.param)


def read(path):
    from gguf import GGUFReader

    reader = GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items()}, reader.tensors


def logits_of(path, ids):
    with torch.inference_mode():
        return load_model(path)(torch.tensor([ids])).logits[0]


def test_bf16_file_is_exactly_the_same_model(model_path, tmp_path):
    write_gguf(model_path, tmp_path / "m.gguf", "bf16", name="tiny")
    ids = [1, 40, 41, 7, 300, 2, 5]
    assert torch.equal(logits_of(tmp_path / "m.gguf", ids), logits_of(model_path, ids))


@pytest.mark.parametrize(("quantization", "furthest"), [("f16", 2e-4), ("q8_0", 0.01), ("q4_0", 0.2)])
def test_quantized_weights_are_as_near_as_their_bits_allow(model_path, tmp_path, quantization, furthest):
    write_gguf(model_path, tmp_path / "m.gguf", quantization, name="tiny")
    expected, found = load_model(model_path).state_dict(), load_model(tmp_path / "m.gguf").state_dict()
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert (weight - found[name]).abs().max() <= furthest, name


def test_the_tokenizer_is_copied_token_by_token(model_path, tmp_path):
    write_gguf(model_path, tmp_path / "m.gguf", "bf16", name="tiny")
    fields, _ = read(tmp_path / "m.gguf")
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    texts, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert texts[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert (len(texts), texts[-1], types[-1]) == (320, "[PAD319]", 5)
    assert types[:3] == [3, 3, 3]
    assert types[tokenizer.convert_tokens_to_ids("<tool>")] == 4
    assert set(types[3:290]) <= {1, 4, 5}
    assert fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    ids = [fields[f"tokenizer.ggml.{role}_token_id"] for role in ("bos", "eos", "unknown")]
    assert ids == [1, 2, 0]
    assert fields["tokenizer.ggml.add_bos_token"] is False
    assert fields["tokenizer.chat_template"] == TEMPLATE
    if fields["general.architecture"] == "llama":
        # Transformers ignores the pre-tokenizer of the file for Qwen.
        loaded = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
        text = "How heavy? <tool> 35 crates, 12.5 kg\n"
        assert loaded(text).input_ids == tokenizer(text).input_ids


def test_file_names_every_end_of_a_reply_and_tokens_that_only_the_tokenizers_settings_name(tmp_path):
    folder = save_tiny_export_model(tmp_path / "model", "qwen2", eos_token_id=[0, 1])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = settings.get("added_tokens_decoder", {}) | {
        "300": {"content": "<call>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    write_gguf(folder, tmp_path / "m.gguf", "bf16", name="tiny")
    fields, _ = read(tmp_path / "m.gguf")
    assert [fields[f"tokenizer.ggml.{role}_token_id"] for role in ("eos", "eot", "eom")] == [2, 0, 1]
    known = AutoTokenizer.from_pretrained(folder).added_tokens_decoder
    names = {index: fields["tokenizer.ggml.tokens"][index] for index in known}
    assert names == {index: token.content for index, token in known.items()}
    assert "<call>" in names.values()


@pytest.mark.parametrize(
    ("quantization", "fits", "beyond"),
    [("f16", 65504, 65600), ("bf16", 1e30, math.nan), ("q8_0", 1e6, 1e7), ("q4_0", 4e5, 6e5), ("q4_1", 6e4, 7e4)],
)
def test_values_beyond_float16_are_refused(tmp_path, quantization, fits, beyond):
    folder = save_tiny_export_model(tmp_path / "model", "llama")
    weights = load_file(folder / "model.safetensors")
    for value, expected in ((fits, nullcontext()), (beyond, pytest.raises(UserError, match=r"up_proj.*--quantize"))):
        weights["model.layers.1.mlp.up_proj.weight"] = torch.full((96, 64), float(value))
        save_file(weights, folder / "model.safetensors")
        with expected:
            write_gguf(folder, tmp_path / "m.gguf", quantization, name="tiny")


def test_tokenizer_with_more_tokens_than_the_model_is_rejected(tmp_path):
    """A special token, such as a pad, may be added without a row in the embedding."""
    folder = save_tiny_export_model(tmp_path / "model", "llama", vocab_size=262)
    with pytest.raises(UserError, match="vocab_size = 262"):
        write_gguf(folder, tmp_path / "m.gguf", "bf16", name="tiny")


@pytest.mark.parametrize(("opening", "server_begins"), [("{{ bos_token }}", False), ("", True)])
def test_beginning_of_text_token_appears_once(tmp_path, opening, server_begins):
    """Llama 3's tokenizer and its chat template both add the token."""
    folder = save_tiny_export_model(tmp_path / "model", "llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(opening + TEMPLATE.replace("<|im_start|>", "<|endoftext|>"))
    write_gguf(folder, tmp_path / "m.gguf", "bf16", name="tiny")
    assert read(tmp_path / "m.gguf")[0]["tokenizer.ggml.add_bos_token"] is server_begins


WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
WHOLE_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split_by(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ([BYTES], "gpt-2"),
        ([pre_tokenizers.Digits(individual_digits=True), BYTES], "smollm"),
        ([split_by(WORDS), WHOLE_BYTES], "qwen2"),
        ([split_by(WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|")), WHOLE_BYTES], "llama-bpe"),
        ([pre_tokenizers.ByteLevel(add_prefix_space=True)], None),
        ([pre_tokenizers.Digits(individual_digits=False), BYTES], None),
        ([pre_tokenizers.Whitespace()], None),
    ],
)
def test_pre_tokenizer_has_the_name_in_gguf_or_none(steps, name):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    parts = json.loads(tokenizer.to_str())
    if name is None:
        with pytest.raises(UserError, match="--format hf"):
            pre_tokenizer_name(parts)
    else:
        assert pre_tokenizer_name(parts) == name


def test_of_all_normalizers_only_nfc_is_passed_over():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.normalizer = BYTES, normalizers.NFC()
    assert pre_tokenizer_name(json.loads(tokenizer.to_str())) == "gpt-2"
    both = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    for other in (normalizers.NFKC(), normalizers.Lowercase(), normalizers.Prepend("_"), both):
        tokenizer.normalizer = other
        with pytest.raises(UserError, match="--format hf"):
            pre_tokenizer_name(json.loads(tokenizer.to_str()))


FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, **FACTORS}


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [("gemma", {"head_dim": 16}, "gemma"), ("llama", {"rope_parameters": ROPE}, "rope_type 'llama3'")],
)
def test_model_without_an_exact_gguf_form_is_rejected(tmp_path, architecture, changes, message):
    model = save_tiny_export_model(tmp_path / "model", architecture, **changes)
    with pytest.raises(UserError, match=message):
        write_gguf(model, tmp_path / "m.gguf", "f16", name="tiny")
