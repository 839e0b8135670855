"""The weights in a model's folder, read in one way by preflight, learner, engine and export."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import UserError, reason
from rollout.files import read_json

if TYPE_CHECKING:
    from safetensors import safe_open

WEIGHTS = "*.safetensors"
_INDEX = "model.safetensors.index.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_LAYER = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"),
)
FAMILIES = ("llama", "qwen2", "qwen3")


def check_no_adapter(folder: Path) -> None:
    """Raise UserError if an adapter lies in a model's folder: some programs apply it, and others ignore it."""
    if (adapter := folder / "adapter_config.json").exists():
        raise UserError(f"'{adapter}' belongs to an adapter; merge that into the model's weights, or move it elsewhere")


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights. Raises UserError if one is missing, or if programs read different ones."""
    single, index = folder / "model.safetensors", folder / _INDEX
    found = {*folder.glob(WEIGHTS)}
    by_vllm = found
    if index.is_file():
        try:
            by_vllm = {folder / str(name) for name in read_json(index)["weight_map"].values()}
        except (KeyError, AttributeError) as error:
            raise UserError(f"'{index}' has no table weight_map of files; download it again") from error
    # The learner's loader prefers the single file to the index.
    by_learner = by_vllm if index.is_file() and single not in found else {single}
    if wrong := sorted(by_vllm ^ by_learner or by_learner - found):
        fault = "only one of learner and engine would read it" if wrong[0] in found else "it is missing"
        raise UserError(f"'{wrong[0]}': {fault}; keep one complete set, model.safetensors or what {_INDEX} names")
    return sorted(by_learner)


def weights_in(folder: Path, framework: str = "pt") -> "Iterator[tuple[str, safe_open]]":
    """Iterate over the names of a model's weights, each with the open safetensors file that holds it."""
    from safetensors import SafetensorError, safe_open

    for file in weight_files(folder):
        try:
            opened = safe_open(file, framework=framework)
        except (OSError, SafetensorError) as error:
            raise UserError(f"'{file}' is not a complete safetensors file: {reason(error)}; get it again") from error
        with opened as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors


def check_weights(folder: Path) -> None:
    """Check that every program reads the same, complete model from a folder. Raises UserError."""
    check_no_adapter(folder)
    weight_files(folder)
    config = read_json(folder / "config.json")
    if config.get("model_type") not in FAMILIES:
        return
    tied = bool(config.get("tie_word_embeddings"))
    names = {name for name, _ in weights_in(folder, framework="np")}
    if tied and {_HEAD, _EMBEDDING} <= names:
        one, other = (
            tensors.get_tensor(name).float() for name, tensors in weights_in(folder) if name in (_HEAD, _EMBEDDING)
        )
        if not one.equal(other):
            raise UserError(
                f"'{folder}/config.json' says tie_word_embeddings = true, and {_HEAD} differs from {_EMBEDDING}: "
                "programs use different ones; set it to false to use the head, or remove the head"
            )
    layers = range(int(config.get("num_hidden_layers", 0)))
    parts = (f"model.layers.{number}.{part}.weight" for number in layers for part in _LAYER)
    needed = chain((_EMBEDDING, "model.norm.weight"), () if tied else (_HEAD,), parts)
    if missing := next((name for name in needed if name not in names), None):
        raise UserError(
            f"the weights in '{folder}' lack {missing}, which would start at random values; save the whole model "
            "(config.json may need tie_word_embeddings = true)"
        )
