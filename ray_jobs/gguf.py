"""GGUF files and chat templates for Ollama and llama.cpp."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.errors import UserError
from ray_jobs.run.model_folder import ModelShape, read_shape
from rollout.chat import ChatFormat, ChatPieces, reply_ends
from rollout.model_files import weight_files

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_FINE = ("bf16", "f16", "q8_0")
_LARGEST = {"F32": np.inf, "BF16": np.inf, "Q8_0": 127 * 65504.0, "Q5_0": 16 * 65504.0, "Q4_0": 8 * 65504.0}
"""Largest value of a type. Other types store values, or the least one of a block, in float16."""
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_GPT2 = {**_BYTES, "use_regex": True}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
_PRE_TOKENIZERS = {
    "gpt-2": [_GPT2],
    "smollm": [{"type": "Digits", "individual_digits": True}, _GPT2],
    "qwen2": [{**_SPLIT, "pattern": {"Regex": _WORDS % ""}}, _BYTES],
    "llama-bpe": [{**_SPLIT, "pattern": {"Regex": _WORDS % "{1,3}"}}, _BYTES],
}
"""The steps of a tokenizer.json's pre-tokenizer, by GGUF's name for them."""


def go_template(pieces: ChatPieces) -> str:
    """Return the chat template in Go's template language.

    It only appends: rendered turns never change, so the policy sees the dialogue of training, and the server's cache
    stays valid. No marker trims white space, because the template's fixed texts may end in it.
    """
    system = f'{{{{ if eq $m.Role "system" }}}}{pieces.before_system}{{{{ $m.Content }}}}'
    lone = f"{{{{ if eq $i 0 }}}}{pieces.before_lone_user}"
    second = f"{{{{ else if eq $i 1 }}}}{pieces.before_user}"
    later = f"{{{{ else }}}}{pieces.before_next}{{{{ end }}}}"
    user = f'{{{{ else if eq $m.Role "user" }}}}{lone}{second}{later}{{{{ $m.Content }}}}{pieces.generation}'
    assistant = "{{ else }}{{ $m.Content }}{{ end }}"
    return f"{{{{ range $i, $m := .Messages }}}}{system}{user}{assistant}{{{{ end }}}}"


def write_gguf(model_path: Path, target: Path, quantization: str, *, name: str) -> None:
    """Write matrices in `quantization` (embeddings and the head in at least 8 bits) and vectors in float32.

    One tensor is in memory at a time. Raises UserError for a model without an exact GGUF form.
    """
    import gguf
    from transformers import AutoConfig, AutoTokenizer

    shape = read_shape(model_path / "config.json", name=name)
    config = AutoConfig.from_pretrained(model_path)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope != "default":
        raise UserError(
            f"GGUF export supports plain rotary positions, and this model has rope_type '{rope}'; use --format hf"
        )
    writer = gguf.GGUFWriter(target, config.model_type)
    try:
        writer.add_type("model")
        writer.add_name(name)
        _add_shape(writer, config, shape)
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quantization.upper()}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_tokenizer(writer, model_path, AutoTokenizer.from_pretrained(model_path), shape.vocab)
        for tensor_name, tensor, kind in _tensors(model_path, config, quantization):
            writer.add_tensor(tensor_name, tensor, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _tensors(
    model_path: Path, config: "PreTrainedConfig", quantization: str
) -> "Iterator[tuple[str, np.ndarray, GGMLQuantizationType]]":
    """Yield the name, the type and the values of each tensor, which are only read when they are written."""
    import gguf
    from gguf.quants import quantize
    from safetensors import safe_open

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], int(config.num_hidden_layers))
    # GGUF interleaves the rotary pairs of Llama's heads.
    heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
    for file in weight_files(model_path):
        with safe_open(file, framework="pt") as tensors:
            for source in sorted(tensors.keys()):
                name = names.get_name(source, try_suffixes=(".weight", ".bias"))
                if name is None:
                    raise UserError(f"GGUF has no name for {source} of a '{config.model_type}' model; use --format hf")
                shape = tuple(tensors.get_slice(source).get_shape())
                kind = _type(name, shape, quantization)
                paired = (count for part, count in heads.items() if part in source and config.model_type == "llama")
                meta = gguf.LazyNumpyTensor.meta_with_dtype_and_shape(np.float32, shape)
                largest = _LARGEST.get(kind.name, 65504.0)
                read = partial(_read, file, source, heads=next(paired, None), largest=largest)
                lazy: Any = gguf.LazyNumpyTensor(meta=meta, func=read)
                yield name, quantize(lazy, kind), kind


def _read(file: Path, source: str, *, heads: int | None, largest: float) -> np.ndarray:
    import torch
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        values: np.ndarray = tensors.get_tensor(source).to(torch.float32).numpy()
    if not np.abs(values).max(initial=0) <= largest:
        raise UserError(
            f"{source} has values of up to {np.abs(values).max():g}, and the type of the file holds up to {largest:g}, "
            "because it contains float16 numbers; use --quantize bf16"
        )
    if heads is not None:
        pairs = values.reshape(heads, 2, -1, *values.shape[1:])
        values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
    return values


def _type(name: str, shape: tuple[int, ...], quantization: str) -> "GGMLQuantizationType":
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if len(shape) < 2:
        return GGMLQuantizationType.F32
    at_the_ends = name in ("token_embd.weight", "output.weight")
    kind = "q8_0" if at_the_ends and quantization not in _FINE else quantization
    chosen = GGMLQuantizationType[kind.upper()]
    return chosen if shape[-1] % GGML_QUANT_SIZES[chosen][0] == 0 else GGMLQuantizationType.F16


def _add_shape(writer: "GGUFWriter", config: "PreTrainedConfig", shape: ModelShape) -> None:
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab)


def _add_tokenizer(
    writer: "GGUFWriter", model_path: Path, tokenizer: "PreTrainedTokenizerBase", vocab_size: int
) -> None:
    from gguf import TokenType

    file = model_path / "tokenizer.json"
    if not file.is_file():
        raise UserError("GGUF export needs a tokenizer.json, and this model has none; export it with --format hf")
    parts = json.loads(file.read_text(encoding="utf-8"))
    # Some tokens are in tokenizer_config.json only.
    known, added = parts["model"]["vocab"], tokenizer.added_tokens_decoder
    last = max([*known.values(), *added])
    if last >= vocab_size:
        raise UserError(
            f"the tokenizer has a token {last}, and a GGUF file can only name those below the model's vocab_size = "
            f"{vocab_size}; export it with --format hf"
        )
    texts = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    for text, index in known.items():
        texts[index], types[index] = text, TokenType.NORMAL
    for index, token in added.items():
        texts[index] = token.content
        types[index] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(parts))
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in parts["model"]["merges"]])
    for role in ("bos", "unk", "pad"):
        index = getattr(tokenizer, f"{role}_token_id", None)
        if index is not None:
            getattr(writer, f"add_{role}_token_id")(index)
    chat = ChatFormat(tokenizer)
    ends = sorted(reply_ends(model_path, tokenizer), key=lambda end: end != chat.turn_end)
    # Programs end a reply with each of these three.
    for role, end in zip(("eos", "eot", "eom"), ends, strict=False):
        getattr(writer, f"add_{role}_token_id")(end)
    # The server must add the beginning-of-text token unless the chat template does; it must never appear twice.
    bos = tokenizer.bos_token
    adds_bos = bos is not None and tokenizer("x").input_ids[0] == tokenizer.bos_token_id
    writer.add_add_bos_token(adds_bos and not chat.pieces.before_lone_user.startswith(bos))
    writer.add_chat_template(tokenizer.chat_template)


def pre_tokenizer_name(parts: dict[str, Any]) -> str:
    """Return GGUF's name for how a tokenizer.json splits text before byte-pair encoding. Raises UserError without one.

    A wrong name would give the model tokens that it was never trained on. NFC, Qwen's normalizer, is passed over: it
    changes no composed text, and no program that reads GGUF has it.
    """
    normalizer = parts.get("normalizer") or {"type": "NFC"}
    pre = parts.get("pre_tokenizer") or {}
    steps = [dict(step) for step in pre.get("pretokenizers", [pre])]
    for step in steps:
        # Offsets change no token, and a file may leave out the default.
        step.pop("trim_offsets", None)
        if step.get("type") == "ByteLevel":
            step.setdefault("use_regex", True)
    name = next((name for name, known in _PRE_TOKENIZERS.items() if known == steps), None)
    if parts["model"].get("type") != "BPE" or name is None or normalizer != {"type": "NFC"}:
        raise UserError(
            "GGUF export supports the byte-level BPE tokenizers of GPT-2, SmolLM, Qwen and Llama 3, and this one "
            "changes or splits text differently; export it with --format hf"
        )
    return name
