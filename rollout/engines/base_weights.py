"""One copy of the frozen base weights, which an engine and a learner use together.

vLLM joins queries, keys and values, and gate and up, along their outputs. A slice of rows is contiguous, so each part
is a view of the joined weight: the learner's model, by transformers' names, is built on such views without a copy.
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
"""Shapes of weights by transformers' names."""
Rows = Mapping[str, tuple[int, ...]]
"""Rows of each part of a joined weight, in order, by the joined weight's name."""


def rows_of(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the rows of the parts of all joined weights. Raises KeyError if a part is missing."""
    joined = (_joined_name(name) for name in shapes)
    return {whole: tuple(shapes[part][0] for part in parts) for whole, parts in joined if parts}


def empty_joined(shapes: Shapes, rows: Rows, *, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Allocate the weights by vLLM's names. A weight that is not joined keeps its name and shape."""
    sizes: dict[str, Sequence[int]] = {}
    for name, shape in shapes.items():
        whole, _ = _joined_name(name)
        sizes[whole] = [sum(rows[whole]), *shape[1:]] if whole in rows else shape
    return {name: torch.empty(*size, dtype=dtype, device=device) for name, size in sizes.items()}


def separate(joined: Mapping[str, Tensor], rows: Rows) -> dict[str, Tensor]:
    """Return views of the joined weights by transformers' names."""
    weights: dict[str, Tensor] = {}
    for name, weight in joined.items():
        if name not in rows:
            weights[name] = weight
            continue
        whole = name.split(".")[-2]
        borders = pairwise(accumulate(rows[name], initial=0))
        for part, (start, end) in zip(JOINED[whole], borders, strict=True):
            weights[name.replace(f".{whole}.", f".{part}.")] = weight[start:end]
    return weights


def _joined_name(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the name of the joined weight and of all its parts; for other weights the same name and no parts."""
    part = name.split(".")[-2] if "." in name else ""
    if part not in WHOLE:
        return name, ()
    whole = WHOLE[part]
    parts = tuple(name.replace(f".{part}.", f".{sibling}.") for sibling in JOINED[whole])
    return name.replace(f".{part}.", f".{whole}."), parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedBase:
    """Access to the weights for one other process of this machine.

    The memory belongs to the process that holds them, and must not be written to.
    """

    rows: Rows
    handles: Mapping[str, tuple[Any, tuple[Any, ...]]]
    """CUDA IPC handles by vLLM's names, on a card."""
    file: Path | None = None
    """File in shared memory, on a CPU."""

    def joined(self) -> dict[str, Tensor]:
        """Return the weights by vLLM's names."""
        if self.file is not None:
            return load_file(self.file)
        return {name: build(*arguments) for name, (build, arguments) in self.handles.items()}

    def parts(self) -> dict[str, Tensor]:
        """Return the weights by transformers' names."""
        return separate(self.joined(), self.rows)


class BaseWeights:
    """The joined weights of a model."""

    def __init__(self, model_path: Path, *, device: str, precision: Precision) -> None:
        """Load the weights. Raises ValueError for a model that vLLM joins in another way."""
        shapes = {name: weights.get_slice(name).get_shape() for name, weights in weights_in(model_path)}
        try:
            self._rows = rows_of(shapes)
        except KeyError as error:
            raise ValueError(
                f"{model_path} has no weight {error}, which an engine joins with others: card.share_base is for models "
                "of the Llama, Qwen2 and Qwen3 families; set card.share_base=false"
            ) from error
        self._joined = empty_joined(shapes, self._rows, device=device, dtype=getattr(torch, precision))
        # Each weight is copied into its place, so that none is on the device twice.
        parts = separate(self._joined, self._rows)
        for name, weights in weights_in(model_path):
            parts[name].copy_(weights.get_tensor(name))
        self._shared: MemoryFolder | None = None

    def export(self) -> ExportedBase:
        """Return access for one process. Each process needs its own: a card counts the users of its memory."""
        if next(iter(self._joined.values())).is_cuda:
            from torch.multiprocessing.reductions import reduce_tensor

            handles = {name: reduce_tensor(weight) for name, weight in self._joined.items()}
            return ExportedBase(rows=self._rows, handles=handles)
        if self._shared is None:
            # From now on the file is the only copy.
            self._shared = MemoryFolder(sum(weight.nbytes for weight in self._joined.values()))
            save_file(self._joined, self._shared.path / "base.safetensors")
            self._joined = load_file(self._shared.path / "base.safetensors")
        return ExportedBase(rows=self._rows, handles={}, file=self._shared.path / "base.safetensors")

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
