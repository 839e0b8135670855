"""GGUF files and Modelfiles: a policy for Ollama and llama.cpp."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.errors import reason
from learner.export import WEIGHTS, ExportError
from rollout.chat import ChatPieces, chat_pieces

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


def go_template(pieces: ChatPieces) -> str:
    """The chat template in Go's language. It only appends: a turn that was rendered once stays as it was, so that the
    server's cache and the policy see the dialogue that training saw. No marker trims white space, which a template's
    fixed text may end in."""
    system = f'{{{{ if eq $m.Role "system" }}}}{pieces.before_system}{{{{ $m.Content }}}}'
    lone = f"{{{{ if eq $i 0 }}}}{pieces.before_lone_user}"
    second = f"{{{{ else if eq $i 1 }}}}{pieces.before_user}"
    later = f"{{{{ else }}}}{pieces.before_next}{{{{ end }}}}"
    user = f'{{{{ else if eq $m.Role "user" }}}}{lone}{second}{later}{{{{ $m.Content }}}}{pieces.generation}'
    assistant = "{{ else }}{{ $m.Content }}{{ end }}"
    return f"{{{{ range $i, $m := .Messages }}}}{system}{user}{assistant}{{{{ end }}}}"


def render_modelfile(gguf_name: str, template: str, parameters: Mapping[str, object]) -> str:
    """Raises ValueError for a template that a Modelfile cannot hold."""
    if '"""' in template:
        raise ValueError('a chat template with """ in it cannot stand in a Modelfile')
    lines = [f"FROM ./{gguf_name}", f'TEMPLATE """{template}"""']
    for name, value in parameters.items():
        values = value if isinstance(value, list) else [value]
        lines += [f'PARAMETER {name} "{one}"' if isinstance(one, str) else f"PARAMETER {name} {one}" for one in values]
    return "\n".join(lines) + "\n"


ARCHITECTURES = ("llama", "qwen2", "qwen3")
_FINE = ("bf16", "f16", "q8_0")

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {
    ("gpt2",): "gpt-2",
    ("digits", "gpt2"): "smollm",
    (_WORDS % "", "bytes"): "qwen2",
    (_WORDS % "{1,3}", "bytes"): "llama-bpe",
}


def write_gguf(model_path: Path, target: Path, quantization: str, *, name: str) -> None:
    """Matrices in `quantization` (embeddings and the head in at least 8 bits), vectors in float32; one tensor is in
    memory at a time. Raises ExportError for a model that has no faithful GGUF form, OSError when the disk is full."""
    import gguf
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(model_path)
    architecture = _architecture(config)
    tensors = list(_tensors(model_path, config, architecture, quantization))
    writer = gguf.GGUFWriter(target, architecture)
    try:
        writer.add_type("model")
        writer.add_name(name)
        _add_shape(writer, config)
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quantization.upper()}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_tokenizer(writer, model_path, AutoTokenizer.from_pretrained(model_path), int(config.vocab_size))
        for tensor in tensors:
            tensor.announce(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.data())
    finally:
        writer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """One weight: where it comes from, and how it is stored. `heads`: its rows are rotary pairs of so many heads, which
    Llama's GGUF form interleaves."""

    file: Path
    source: str
    name: str
    shape: tuple[int, ...]
    type: "GGMLQuantizationType"
    heads: int | None

    def announce(self, writer: "GGUFWriter") -> None:
        from gguf.quants import quant_shape_to_byte_shape

        plain = {"F32": np.float32, "F16": np.float16}.get(self.type.name)
        shape = self.shape if plain else quant_shape_to_byte_shape(self.shape, self.type)
        dtype = np.dtype(plain or np.uint8)
        size = int(np.prod(shape)) * dtype.itemsize
        writer.add_tensor_info(self.name, shape, dtype, size, raw_dtype=self.type)

    def data(self) -> np.ndarray:
        import torch
        from gguf.quants import quantize
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as tensors:
            values = tensors.get_tensor(self.source).to(torch.float32).numpy()
        if self.heads is not None:
            pairs = values.reshape(self.heads, 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
        if self.type.name == "F16" and np.abs(values).max(initial=0) > np.finfo(np.float16).max:
            raise ExportError(f"{self.source} has values beyond float16; export with --quantize bf16 or q8_0")
        return np.asarray(quantize(values, self.type))


def _architecture(config: "PreTrainedConfig") -> str:
    kind = str(config.model_type)
    if kind not in ARCHITECTURES:
        raise ExportError(
            f"GGUF is written for the architectures {', '.join(ARCHITECTURES)}, this model is '{kind}'; "
            "export it with --format hf"
        )
    rope = str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))
    if rope != "default" or getattr(config, "use_sliding_window", False):
        raise ExportError(
            f"GGUF is written for plain rotary positions, this model has rope_type '{rope}' or a sliding window; "
            "export it with --format hf"
        )
    return kind


def _tensors(model_path: Path, config: "PreTrainedConfig", architecture: str, quantization: str) -> Iterator[_Tensor]:
    import gguf
    from safetensors import safe_open

    model_arch = gguf.MODEL_ARCH[architecture.upper()]
    names = gguf.get_tensor_name_map(model_arch, int(config.num_hidden_layers))
    for file in sorted(model_path.glob(WEIGHTS)):
        with safe_open(file, framework="pt") as tensors:
            for source in sorted(tensors.keys()):
                name = names.get_name(source, try_suffixes=(".weight", ".bias"))
                if name is None:
                    raise ExportError(f"GGUF has no name for {source} of a '{architecture}' model; use --format hf")
                shape = tuple(tensors.get_slice(source).get_shape())
                yield _Tensor(
                    file=file,
                    source=source,
                    name=name,
                    shape=shape,
                    type=_type(name, shape, quantization),
                    heads=_interleaved_heads(source, config) if architecture == "llama" else None,
                )


def _type(name: str, shape: tuple[int, ...], quantization: str) -> "GGMLQuantizationType":
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if len(shape) < 2:
        return GGMLQuantizationType.F32
    at_the_ends = name in ("token_embd.weight", "output.weight")
    kind = "q8_0" if at_the_ends and quantization not in _FINE else quantization
    chosen = GGMLQuantizationType[kind.upper()]
    return chosen if shape[-1] % GGML_QUANT_SIZES[chosen][0] == 0 else GGMLQuantizationType.F16


def _interleaved_heads(source: str, config: "PreTrainedConfig") -> int | None:
    if ".q_proj." in source:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".k_proj." in source else None


def _add_shape(writer: "GGUFWriter", config: "PreTrainedConfig") -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(
    writer: "GGUFWriter", model_path: Path, tokenizer: "PreTrainedTokenizerBase", vocab_size: int
) -> None:
    from gguf import TokenType

    try:
        parts = json.loads((model_path / "tokenizer.json").read_text())
    except (OSError, ValueError) as error:
        raise ExportError(f"{model_path.name} has no tokenizer.json that can be read: {reason(error)}") from error
    known, added = parts["model"]["vocab"], parts["added_tokens"]
    last = max([*known.values(), *(token["id"] for token in added)])
    if last >= vocab_size:
        raise ExportError(
            f"the tokenizer has a token {last}, and the model knows those below its vocab_size = {vocab_size}, as many "
            "as a GGUF file may name; export it with --format hf"
        )
    texts = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    for text, index in known.items():
        texts[index], types[index] = text, TokenType.NORMAL
    for token in added:
        texts[token["id"]] = token["content"]
        types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(parts))
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in parts["model"]["merges"]])
    for role in ("bos", "eos", "unk", "pad"):
        index = getattr(tokenizer, f"{role}_token_id", None)
        if index is not None:
            getattr(writer, f"add_{role}_token_id")(index)
    writer.add_add_bos_token(_server_begins(tokenizer))
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _server_begins(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether a server puts the token that begins every text before a dialogue. Where the chat template writes it, it
    would stand there twice, as it never did in training."""
    bos = tokenizer.bos_token
    if bos is None or tokenizer("x").input_ids[0] != tokenizer.bos_token_id:
        return False
    return not (tokenizer.chat_template and chat_pieces(tokenizer).before_lone_user.startswith(bos))


def pre_tokenizer_name(parts: dict[str, Any]) -> str:
    """GGUF's name for how a tokenizer.json splits text before byte-pair encoding. The name of another splitting would
    give the model tokens that it was never trained on. Raises ExportError when GGUF has no name for it."""
    pre = parts.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre])
    name = _PRE_TOKENIZERS.get(tuple(map(_step, steps)))
    if parts["model"].get("type") != "BPE" or name is None:
        raise ExportError(
            "GGUF is written for byte-level BPE tokenizers of GPT-2, SmolLM, Qwen and Llama 3, this one splits text "
            "another way; export it with --format hf"
        )
    return name


def _step(step: dict[str, Any]) -> str:
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return "gpt2" if step.get("use_regex", True) else "bytes"
    if kind == "Digits" and step.get("individual_digits"):
        return "digits"
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return str(step["pattern"].get("Regex", ""))
    return str(kind)
