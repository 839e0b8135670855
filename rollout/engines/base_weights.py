"""One copy of the frozen base weights, which an engine and a learner use together.

vLLM joins queries, keys and values, and gate and up, along their outputs. Each part is a contiguous slice of rows, so
the learner's model is built on views, without a copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.base import Precision
from rollout.engines.read_back import JOINED, WHOLE
from rollout.files import MemoryFolder
from rollout.model_files import check_weights, weights_in

Places = Mapping[str, tuple[str, int, int]]
"""By transformers' name of a weight: vLLM's name of the joined weight, and the start and end of its rows there."""


def places_of(shapes: Mapping[str, Sequence[int]]) -> Places:
    """Return the places of weights with these shapes."""
    places = {}
    for name, shape in shapes.items():
        part = name.rpartition(".")[0].rpartition(".")[2]
        whole = WHOLE.get(part, part)
        siblings = [name.replace(f".{part}.", f".{sibling}.") for sibling in JOINED.get(whole, (part,))]
        rows = [shapes[sibling][0] for sibling in siblings]
        start = sum(rows[: siblings.index(name)])
        places[name] = name.replace(f".{part}.", f".{whole}."), start, start + shape[0]
    return places


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedBase:
    """Access for another process of this machine. The memory belongs to its holder, and is not written to."""

    places: Places
    handles: Mapping[str, tuple[Callable[..., Tensor], tuple[object, ...]]]
    """CUDA IPC handles by vLLM's names, on a card."""
    file: Path | None = None
    """In shared memory, on a CPU."""

    def joined(self) -> dict[str, Tensor]:
        """Return the weights by vLLM's names."""
        if self.file is not None:
            return load_file(self.file)
        return {name: build(*arguments) for name, (build, arguments) in self.handles.items()}

    def parts(self) -> dict[str, Tensor]:
        """Return views of the joined weights by transformers' names."""
        joined = self.joined()
        return {name: joined[whole][start:end] for name, (whole, start, end) in self.places.items()}


class BaseWeights:
    """The joined weights of a model."""

    def __init__(self, model_path: Path, *, device: str, precision: Precision) -> None:
        """Load the weights of a model of one of `FAMILIES`."""
        check_weights(model_path)
        shapes = {name: weights.get_slice(name).get_shape() for name, weights in weights_in(model_path)}
        self._places = places_of(shapes)
        sizes: dict[str, tuple[int, ...]] = {}
        for name, (whole, _, end) in self._places.items():
            sizes[whole] = max(sizes.get(whole, ()), (end, *shapes[name][1:]))
        dtype = getattr(torch, precision)
        self._joined = {name: torch.empty(*size, dtype=dtype, device=device) for name, size in sizes.items()}
        # Each weight is copied into its place, so that none is on the device twice.
        for name, weights in weights_in(model_path):
            whole, start, end = self._places[name]
            self._joined[whole][start:end].copy_(weights.get_tensor(name))
        self._shared: MemoryFolder | None = None

    def export(self) -> ExportedBase:
        """Return access for one process. Each process needs its own: a card counts the users of its memory."""
        if next(iter(self._joined.values())).is_cuda:
            from torch.multiprocessing.reductions import reduce_tensor

            handles = {name: reduce_tensor(weight) for name, weight in self._joined.items()}
            return ExportedBase(places=self._places, handles=handles)
        if self._shared is None:
            # This file replaces the copy in this process.
            self._shared = MemoryFolder(sum(weight.nbytes for weight in self._joined.values()))
            save_file(self._joined, self._shared.path / "base.safetensors")
            self._joined = load_file(self._shared.path / "base.safetensors")
        return ExportedBase(places=self._places, handles={}, file=self._shared.path / "base.safetensors")

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
