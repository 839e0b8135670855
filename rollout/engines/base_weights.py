"""One copy of the frozen base weights, which an engine and a learner read side by side.

vLLM joins queries, keys and values, and gate and up, along their outputs. A slice of rows is contiguous, so each part
is a view of what was joined: the learner's model, by transformers' names, is built on such views without a copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.base import Precision
from rollout.engines.adapters import weights_in
from rollout.engines.read_back import JOINED, WHOLE
from rollout.files import MemoryFolder

Shapes = Mapping[str, Sequence[int]]
"""By a weight's name, of transformers."""
Rows = Mapping[str, tuple[int, ...]]
"""By a joined weight's name: the rows of each of its parts, in order."""


def rows_of(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """What `separate` needs to know of weights that are to be joined, from their shapes by transformers' names. Raises
    KeyError where a part is missing."""
    found = (_names(name) for name in shapes)
    return {whole: tuple(shapes[part][0] for part in parts) for whole, parts in found if parts}


def empty_joined(shapes: Shapes, rows: Rows, *, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Room for the weights by vLLM's names; what is not joined has the name and the shape that it had."""
    sizes: dict[str, Sequence[int]] = {}
    for name, shape in shapes.items():
        whole, _ = _names(name)
        sizes[whole] = [sum(rows[whole]), *shape[1:]] if whole in rows else shape
    return {name: torch.empty(*size, dtype=dtype, device=device) for name, size in sizes.items()}


def separate(joined: Mapping[str, Tensor], rows: Rows) -> dict[str, Tensor]:
    """Views by transformers' names of what was joined; nothing is copied."""
    weights: dict[str, Tensor] = {}
    for name, weight in joined.items():
        if name not in rows:
            weights[name] = weight
            continue
        whole = name.split(".")[-2]
        borders = pairwise(accumulate(rows[name], initial=0))
        for part, (begin, end) in zip(JOINED[whole], borders, strict=True):
            weights[name.replace(f".{whole}.", f".{part}.")] = weight[begin:end]
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedBase:
    """How one other process of this machine comes to the weights, once: on a card through CUDA IPC, on a CPU through a
    file in shared memory. The memory is the holder's, and nobody writes to it."""

    rows: Rows
    handles: Mapping[str, tuple[Any, tuple[Any, ...]]]
    file: Path | None = None

    def joined(self) -> dict[str, Tensor]:
        """By vLLM's names."""
        if self.file is not None:
            return load_file(self.file)
        return {name: build(*arguments) for name, (build, arguments) in self.handles.items()}

    def parts(self) -> dict[str, Tensor]:
        """By transformers' names."""
        return separate(self.joined(), self.rows)


class BaseWeights:
    """Holds a model's weights, joined, as long as it lives. Raises ValueError for a model that vLLM joins otherwise."""

    def __init__(self, model_path: Path, *, device: str, precision: Precision) -> None:
        shapes = {name: weights.get_slice(name).get_shape() for name, weights in weights_in(model_path)}
        try:
            self._rows = rows_of(shapes)
        except KeyError as error:
            raise ValueError(
                f"{model_path} has no weight {error}, which an engine joins with others: card.share_base is for models "
                "of the Llama, Qwen2 and Qwen3 families; set card.share_base=false"
            ) from error
        self._joined = self._loaded(model_path, shapes, device, precision)
        self._shared: MemoryFolder | None = None

    def export(self) -> ExportedBase:
        """Anew for each process: a card counts who maps its memory."""
        if next(iter(self._joined.values())).is_cuda:
            from torch.multiprocessing.reductions import reduce_tensor

            handles = {name: reduce_tensor(weight) for name, weight in self._joined.items()}
            return ExportedBase(rows=self._rows, handles=handles)
        return ExportedBase(rows=self._rows, handles={}, file=self._file())

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()

    def _loaded(self, model_path: Path, shapes: Shapes, device: str, precision: Precision) -> dict[str, Tensor]:
        """Each part is copied to its place in what is joined: no weight is on the device twice."""
        joined = empty_joined(shapes, self._rows, device=device, dtype=getattr(torch, precision))
        places = separate(joined, self._rows)
        for name, weights in weights_in(model_path):
            places[name].copy_(weights.get_tensor(name))
        return joined

    def _file(self) -> Path:
        """Written at the first export; then it is the only copy."""
        if self._shared is None:
            self._shared = MemoryFolder(sum(weight.nbytes for weight in self._joined.values()))
            file = self._shared.path / "base.safetensors"
            save_file(self._joined, file)
            self._joined = load_file(file)
        return self._shared.path / "base.safetensors"


def _names(name: str) -> tuple[str, tuple[str, ...]]:
    """Of the joined weight that a weight goes into, and of all its parts; its own and none where it is not joined."""
    part = name.split(".")[-2] if "." in name else ""
    if part not in WHOLE:
        return name, ()
    whole = WHOLE[part]
    parts = tuple(name.replace(f".{part}.", f".{one}.") for one in JOINED[whole])
    return name.replace(f".{part}.", f".{whole}."), parts
