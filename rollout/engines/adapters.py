"""How an adapter reaches the engine: merged into the base weights, or as one of vLLM's own adapters."""

import json
import shutil
import sys
from collections.abc import Iterator, Set
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from configs.base import Precision
from rollout.engines.engine import BASE_VERSION
from rollout.engines.read_back import ReadBack, read_slots, together
from rollout.engines.vllm_parts import MAX_LORAS, lora_request
from rollout.files import MemoryFolder

if TYPE_CHECKING:
    from safetensors import safe_open
    from torch import Tensor

    from rollout.engines.vllm_parts import LLMEngine, LoRARequest

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
KEPT = MAX_LORAS + 1
"""Adapters of which there are files at a time: those that vLLM holds, and the next."""


class AdapterMerger:
    """Knows the base model's files; computes W0 + scale * B A in float32, from the untouched W0 for every version.

    `dtype` is what the result is rounded to: the engine's, since a step of RL is less than bfloat16 can tell of most
    weights. None: the file's own.
    """

    def __init__(self, model_path: Path, scale: float, *, dtype: Precision | None = None) -> None:
        self._model_path = model_path
        self._dtype = dtype
        self.scale = scale

    def merged_weights(self, adapter: bytes) -> "Iterator[tuple[str, Tensor]]":
        """Every base weight by its Hugging Face name, the adapter folded in where it has one. Raises ValueError before
        the first of them when the adapter does not fit: a model that is replaced by half is none."""
        return self._merged(self._factors(adapter))

    def base_weights(self) -> "Iterator[tuple[str, Tensor]]":
        for name, tensors in weights_in(self._model_path):
            yield name, tensors.get_tensor(name)

    def write_adapter_folder(self, folder: Path, adapter: bytes) -> None:
        """The adapter as a PEFT folder. Raises ValueError before it is there when the adapter does not fit."""
        factors = self._factors(adapter)
        rank = next(tensor.shape[0] for name, tensor in factors.items() if "lora_A" in name)
        targets = sorted({name.split(".lora_")[0].rsplit(".", 1)[1] for name in factors})
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(adapter)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self._model_path),
            "r": rank,
            "lora_alpha": self.scale * rank,
            "target_modules": targets,
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))

    def _merged(self, factors: "dict[str, Tensor]") -> "Iterator[tuple[str, Tensor]]":
        import torch

        for name, weight in self.base_weights():
            stem = _stem(name)
            if stem + _A not in factors:
                yield name, weight
                continue
            a, b = factors[stem + _A].to(torch.float32), factors[stem + _B].to(torch.float32)
            dtype = getattr(torch, self._dtype) if self._dtype else weight.dtype
            yield name, (weight.to(torch.float32) + (b @ a) * self.scale).to(dtype)

    def check(self, adapter: bytes, *, rank: int) -> None:
        """Raises ValueError where the adapter is of another model or of another rank, whose scale would be wrong."""
        factors = self._factors(adapter)
        found = {int(factor.shape[0]) for name, factor in factors.items() if name.endswith(_A)}
        if found != {rank}:
            raise ValueError(f"its rank is {sorted(found)}, the configuration says model.lora_rank = {rank}")
        for name, tensors in weights_in(self._model_path):
            stem = _stem(name)
            if stem + _A in factors:
                fits = [factors[stem + _B].shape[0], factors[stem + _A].shape[1]]
                if (shape := tensors.get_slice(name).get_shape()) != fits:
                    raise ValueError(f"{name} has the shape {shape} in the model, and {fits} in the adapter")

    def _factors(self, adapter: bytes) -> "dict[str, Tensor]":
        """The tensors of an adapter of this model."""
        import safetensors.torch

        try:
            factors = safetensors.torch.load(adapter)
        except safetensors.SafetensorError as error:
            raise ValueError(f"these bytes are no adapter: {error}") from error
        stems = {name.removesuffix(_A).removesuffix(_B) for name in factors}
        if missing := {stem + end for stem in stems for end in (_A, _B)} - factors.keys():
            raise ValueError(f"the adapter lacks {sorted(missing)[:3]}")
        if strange := stems - {_stem(name) for name, _ in weights_in(self._model_path)}:
            raise ValueError(f"the adapter has weights the base model lacks: {sorted(strange)[:3]}")
        return factors


def weights_in(model_path: Path) -> "Iterator[tuple[str, safe_open]]":
    """The name of every weight of a model folder, and the open safetensors file that holds it."""
    from safetensors import safe_open

    for file in sorted(model_path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors


def _stem(name: str) -> str:
    """What the factors of a base weight are called."""
    return _PREFIX + name.removesuffix(".weight")


class NativeAdapters:
    """Each version has a name, a number and a folder of its own, none of which is ever used again: vLLM keys its prefix
    cache by name and folder, and takes a number that it knows for weights that it has."""

    def __init__(self, llm: "LLMEngine", merger: AdapterMerger) -> None:
        self._llm = llm
        self._merger = merger
        self._places: list[MemoryFolder] = []
        self._held: dict[int, LoRARequest] = {}
        self._numbers = count(1)

    def write(self, version: int, digest: str, adapter: bytes) -> "LoRARequest":
        """Write an adapter down; vLLM knows nothing of it yet, but what it is called, and where it lies. For a thread
        that may wait for it. Raises ValueError where it is no adapter of this model, or where there is no room."""
        number = next(self._numbers)
        name = f"v{version}-{number}-{digest[:8]}"
        if not self._places:
            self._places.append(MemoryFolder(KEPT * len(adapter)))
        try:
            folder = self._written(name, adapter)
        except OSError as full:
            # There was room before others took it. More than any memory has is on disk.
            if self._places[-1].in_memory:
                self._places.append(MemoryFolder(sys.maxsize))
            try:
                folder = self._written(name, adapter)
            except OSError as error:
                raise ValueError(
                    f"no room for an adapter of {len(adapter) / 1e6:.1f} MB: /dev/shm, {full.strerror}; "
                    f"{self._places[-1].path.parents[1]}, {error.strerror}; give /dev/shm more room "
                    "(docker run --shm-size), or name a larger disk with TMPDIR"
                ) from error
        return lora_request(name, number, folder)

    def discard(self, written: "LoRARequest") -> None:
        """It is not loaded, or not any more."""
        shutil.rmtree(written.lora_path, ignore_errors=True)

    def load(self, version: int, written: "LoRARequest") -> None:
        if not self._llm.add_lora(written):
            raise RuntimeError(f"vLLM refused adapter version {version}")
        self._held[version] = written

    def request(self, version: int) -> "LoRARequest | None":
        """What a request that samples with `version` is given; None for the base model, and for nothing else: an
        adapter that is missing is an error."""
        return None if version == BASE_VERSION else self._held[version]

    def read_back(self, version: int) -> ReadBack:
        """What vLLM's slots hold as `version`."""
        if version == BASE_VERSION:
            return ReadBack(given="", held="")
        held = self._held[version]
        folder = Path(held.lora_path)
        read = partial(read_slots, number=held.lora_int_id, folder=folder, scale=self._merger.scale)
        return together(self._llm.collective_rpc(read))

    def drop_unused(self, used: Set[int]) -> None:
        """Forget every version but these. One in use would be read from its folder again, in the middle of a step."""
        for version in self._held.keys() - used:
            held = self._held.pop(version)
            self._llm.remove_lora(held.lora_int_id)
            self.discard(held)

    def close(self) -> None:
        for place in self._places:
            place.close()

    def _written(self, name: str, adapter: bytes) -> Path:
        """Half of an adapter is none."""
        folder = self._places[-1].path / name
        try:
            self._merger.write_adapter_folder(folder, adapter)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder
