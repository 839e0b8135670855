"""A policy as a model of its own: the adapter folded into the base weights, in Hugging Face's format."""

import hashlib
import shutil
from itertools import islice
from pathlib import Path

from configs.errors import UserError
from rollout.engines.adapters import AdapterMerger

WEIGHTS = "*.safetensors"
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5")


class ExportError(UserError):
    """A model that cannot be exported; the message says why and what to do."""


def write_merged_model(model_path: Path, adapter: bytes | None, target: Path, *, rank: int, alpha: float) -> None:
    """The model of `model_path` with the adapter folded in (None: as it is): W0 + alpha / rank * B A, computed in
    float32 and rounded to the base's own type, as for an engine of that type. One file is in memory at a time.

    Raises ExportError when the adapter does not fit the model, OSError when the disk is full.
    """
    merger = AdapterMerger(model_path, alpha / rank)
    try:
        if adapter is not None:
            merger.check(adapter, rank=rank)
        weights = merger.merged_weights(adapter) if adapter is not None else merger.base_weights()
    except ValueError as error:
        raise ExportError(f"the adapter does not fit model {model_path.name}: {error}") from error
    target.mkdir(parents=True)
    for path in sorted(model_path.iterdir()):
        if path.is_file() and path.suffix not in _OTHER_WEIGHTS and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)
    from safetensors import safe_open
    from safetensors.torch import save_file

    for path in sorted(model_path.glob(WEIGHTS)):
        with safe_open(path, framework="pt") as tensors:
            count = len(tensors.keys())
        save_file(dict(islice(weights, count)), target / path.name, metadata={"format": "pt"})


def size_of_weights(model_path: Path) -> int:
    """Bytes."""
    return sum(path.stat().st_size for path in model_path.glob(WEIGHTS))


def file_digests(folder: Path) -> dict[str, str]:
    """The sha256 of every file below `folder`, by its path there."""
    return {str(path.relative_to(folder)): digest_of(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
