"""A model of random weights and of any size, as a folder: for what does not depend on what a model knows."""

from pathlib import Path
from typing import Any, Literal

Sizes = Literal["tiny", "qwen3-8b"]
WORDS = 500
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": WORDS + 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}


def write_folder(folder: Path, sizes: Sizes, *, weights: bool = False) -> Path:
    """Configuration and a tokenizer of words, and random weights if they are asked for; returns the folder."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3", **_sizes(sizes))
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    if weights:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def _sizes(sizes: Sizes) -> dict[str, Any]:
    if sizes == "tiny":
        return TINY
    from ray_jobs.run.model_folder import known_models

    known: dict[str, Any] = known_models()["Qwen/Qwen3-8B"]["config"]
    return {name: value for name, value in known.items() if name not in ("model_type", "architectures")}


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<eos>", "{", "}", *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")


def random_weights(folder: Path, *, device: str, precision: str) -> dict[str, Any]:
    """A base's weights by transformers' names, made up on the device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    generator, dtype = torch.Generator(device).manual_seed(0), getattr(torch, precision)

    def made(shape: torch.Size) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=device, dtype=dtype)
        return 0.02 * torch.randn(shape, generator=generator, device=device, dtype=dtype)

    return {name: made(parameter.shape) for name, parameter in model.named_parameters()}


def adapter_of(folder: Path, rank: int, *, seed: int, size: float = 0.01) -> bytes:
    """A random adapter of all linear layers, in float32, as a learner publishes one."""
    import safetensors.torch
    import torch

    from ray_jobs.run.model_folder import find_shape

    shape, generator = find_shape(str(folder)), torch.Generator().manual_seed(seed)
    factors: dict[str, Any] = {}
    for layer in range(shape.num_layers):
        for name, (inputs, outputs) in shape.linears.items():
            part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            stem = f"base_model.model.model.layers.{layer}.{part}.{name}"
            factors[f"{stem}.lora_A.weight"] = size * torch.randn(rank, inputs, generator=generator)
            factors[f"{stem}.lora_B.weight"] = size * torch.randn(outputs, rank, generator=generator)
    return safetensors.torch.save(factors)
