"""Export of a policy as a model in Hugging Face's format, with the adapter folded into the base weights."""

import hashlib
import json
import shutil
from itertools import islice
from pathlib import Path

from configs.base import Precision
from configs.errors import UserError
from rollout.engines.adapters import AdapterMerger

WEIGHTS = "*.safetensors"
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5")


def write_merged_model(
    model_path: Path, adapter: bytes | None, target: Path, *, rank: int, alpha: float, dtype: Precision
) -> None:
    """Write the model of `model_path` with the adapter folded in, or unchanged if `adapter` is None.

    The weights W0 + alpha / rank * B A are computed in float32 and rounded to `dtype`, the engine's type. Weights that
    the adapter does not change keep their type. One file is in memory at a time. Raises UserError if the adapter does
    not fit the model, OSError if the disk is full.
    """
    merger = AdapterMerger(model_path, alpha / rank, dtype=dtype)
    try:
        if adapter is not None:
            merger.check(adapter, rank=rank)
        weights = merger.merged_weights(adapter) if adapter is not None else merger.base_weights()
    except ValueError as error:
        raise UserError(f"the adapter does not fit model {model_path.name}: {error}") from error
    target.mkdir(parents=True)
    for path in sorted(model_path.iterdir()):
        if path.is_file() and path.suffix not in _OTHER_WEIGHTS and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)
    if adapter is not None:
        config = target / "config.json"
        settings = json.loads(config.read_text(encoding="utf-8"))
        # Programs load all weights in the type that the configuration names.
        types = {name: dtype for name in ("dtype", "torch_dtype") if name in settings} or {"torch_dtype": dtype}
        config.write_text(json.dumps(settings | types, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    generation = target / "generation_config.json"
    if generation.is_file():
        # Servers take their defaults from this file. The policy was trained without a penalty or a cut of the
        # distribution; the tokens that end a reply are kept.
        settings = json.loads(generation.read_text(encoding="utf-8"))
        kept = {name: settings[name] for name in settings if name.endswith("_token_id") or "version" in name}
        if kept != settings:
            generation.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    from safetensors import safe_open
    from safetensors.torch import save_file

    for path in sorted(model_path.glob(WEIGHTS)):
        with safe_open(path, framework="pt") as tensors:
            count = len(tensors.keys())
        save_file(dict(islice(weights, count)), target / path.name, metadata={"format": "pt"})


def file_digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file in `folder`, by its relative path."""
    return {str(path.relative_to(folder)): file_digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def file_digest(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
