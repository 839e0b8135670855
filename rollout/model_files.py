"""The weights in a model's folder, read in one way by preflight, learner, engine and export."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import UserError, reason
from rollout.files import read_json

if TYPE_CHECKING:
    from safetensors import safe_open

WEIGHTS = "*.safetensors"
_ADAPTER = "adapter_config.json"
_INDEX = "model.safetensors.index.json"
_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens"
_LAYER = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
)
FAMILIES = ("llama", "qwen2", "qwen3")


def check_no_adapter(folder: Path) -> None:
    """Raise UserError if an adapter lies in a model's folder: some programs apply it, and others ignore it."""
    if (folder / _ADAPTER).exists():
        raise UserError(
            f"'{folder}' holds an adapter ({_ADAPTER}) besides a model; merge it into the weights, or move it elsewhere"
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the files with a model's weights.

    Raises UserError if a file is missing, or if there are others, of which programs would read different ones.
    """
    check_no_adapter(folder)
    index = folder / _INDEX
    try:
        named = {*map(str, read_json(index)["weight_map"].values())} if index.is_file() else {"model.safetensors"}
    except (KeyError, AttributeError) as error:
        raise UserError(f"'{index}' has no table weight_map of the weights' files; download it again") from error
    found = {path.name for path in folder.glob(WEIGHTS)}
    if wrong := sorted(named ^ found):
        said = f"its {_INDEX} names" if index.is_file() else f"are model.safetensors, since it has no {_INDEX}"
        raise UserError(
            f"'{folder}' must hold exactly the weights that {said}, and {wrong[0]} is "
            f"{'missing' if wrong[0] in named else 'there as well'}; keep one complete set of {WEIGHTS}"
        )
    return [folder / name for name in sorted(named)]


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
    weight_files(folder)
    config = read_json(folder / "config.json")
    family, tied = config.get("model_type") in FAMILIES, bool(config.get("tie_word_embeddings"))
    if not (family or tied):
        return
    names = {name.removesuffix(".weight") for name, _ in weights_in(folder, framework="np")}
    if tied and {_HEAD, _EMBEDDING} <= names and not _equal(folder, _HEAD, _EMBEDDING):
        raise UserError(
            f"'{folder}/config.json' says tie_word_embeddings = true, and the weights hold a {_HEAD} that differs from "
            f"{_EMBEDDING}: programs use different ones; set it to false to use the head, or remove the head"
        )
    layers = range(int(config.get("num_hidden_layers", 0)))
    needed = {f"model.layers.{number}.{part}" for number in layers for part in _LAYER}
    needed |= {_EMBEDDING, "model.norm", *([] if tied else [_HEAD])}
    if family and (missing := sorted(needed - names)):
        raise UserError(
            f"the weights in '{folder}' lack {missing[0]}, which would start at random values; save the whole model "
            "(config.json may need tie_word_embeddings = true)"
        )


def _equal(folder: Path, *names: str) -> bool:
    one, other = (
        tensors.get_tensor(name).float()
        for name, tensors in weights_in(folder)
        if name.removesuffix(".weight") in names
    )
    return bool(one.equal(other))
