"""The ways of an adapter into a model: merged into the base weights, for engine or export, or as vLLM's own adapter."""

import json
import shutil
from collections.abc import Iterator, Set
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from configs.base import Precision
from configs.errors import UserError
from rollout.chat import reply_ends
from rollout.engines.engine import BASE_VERSION
from rollout.engines.read_back import ReadBack, read_slots, together
from rollout.engines.vllm_parts import MAX_LORAS
from rollout.files import MemoryFolder, named
from rollout.model_files import check_weights, weight_files, weights_in

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5")


class AdapterMerger:
    """Computes W0 + scale * B A in float32, always from the untouched W0 of the base model's files.

    `dtype` is the type of the result, None keeps the file's. It should be the engine's type: one step of RL changes
    most weights by less than bfloat16 can represent.
    """

    def __init__(self, model_path: Path, scale: float, *, dtype: Precision | None = None) -> None:
        self._model_path = model_path
        self._dtype = dtype
        self.scale = scale

    def merged_weights(self, adapter: bytes) -> "Iterator[tuple[str, Tensor]]":
        """Return all base weights with the adapter. Raises ValueError, before the first one, if it does not fit."""
        return self._merged(self._factors(adapter))

    def write_adapter_folder(self, folder: Path, adapter: bytes) -> None:
        """Write the adapter as a PEFT folder. Raises ValueError if it does not fit."""
        factors = self._factors(adapter)
        rank = next(tensor.shape[0] for name, tensor in factors.items() if "lora_A" in name)
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(adapter)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self._model_path),
            "r": rank,
            "lora_alpha": self.scale * rank,
            "target_modules": sorted({name.split(".lora_")[0].rsplit(".", 1)[1] for name in factors}),
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))

    def check(self, adapter: bytes, *, rank: int) -> None:
        """Raise ValueError if the adapter is for another model or rank, and thus another scale."""
        ranks = {int(factor.shape[0]) for name, factor in self._factors(adapter).items() if name.endswith(_A)}
        if ranks != {rank}:
            raise ValueError(f"its rank is {sorted(ranks)}, the configuration says model.lora_rank = {rank}")

    def _merged(self, factors: "dict[str, Tensor]") -> "Iterator[tuple[str, Tensor]]":
        import torch

        for name, tensors in weights_in(self._model_path):
            weight, stem = tensors.get_tensor(name), _stem(name)
            if stem + _A not in factors:
                yield name, weight
                continue
            a, b = factors[stem + _A].to(torch.float32), factors[stem + _B].to(torch.float32)
            dtype = getattr(torch, self._dtype) if self._dtype else weight.dtype
            yield name, (weight.to(torch.float32) + (b @ a) * self.scale).to(dtype)

    def _factors(self, adapter: bytes) -> "dict[str, Tensor]":
        import safetensors.torch

        try:
            factors = safetensors.torch.load(adapter)
        except safetensors.SafetensorError as error:
            raise ValueError(f"these bytes are not an adapter: {error}") from error
        stems = {name.removesuffix(_A).removesuffix(_B) for name in factors}
        if not stems:
            raise ValueError("the adapter has no tensors")
        if missing := {stem + end for stem in stems for end in (_A, _B)} - factors.keys():
            raise ValueError(f"the adapter lacks {sorted(missing)[:3]}")
        for name, tensors in weights_in(self._model_path):
            if (stem := _stem(name)) in stems:
                a, b, shape = factors[stem + _A].shape, factors[stem + _B].shape, tensors.get_slice(name).get_shape()
                if [*b[:1], *a[1:]] != shape or b[1:] != a[:1]:
                    raise ValueError(f"{name} has the shape {shape}, and its factors in the adapter {[*b]} and {[*a]}")
                stems.remove(stem)
        if stems:
            raise ValueError(f"the adapter has weights that the base model lacks: {sorted(stems)[:3]}")
        return factors


def write_merged_model(
    model_path: Path, adapter: bytes, target: Path, *, rank: int, alpha: float, dtype: Precision
) -> None:
    """Write the model of `model_path` with the adapter.

    W0 + alpha / rank * B A is computed in float32 and rounded to `dtype`, the engine's type; weights that do not change
    keep their type. One file is in memory at a time. Raises UserError if the adapter does not fit, OSError if the disk
    is full.
    """
    check_weights(model_path)
    merger = AdapterMerger(model_path, alpha / rank, dtype=dtype)
    try:
        merger.check(adapter, rank=rank)
        weights = merger.merged_weights(adapter)
    except ValueError as error:
        raise UserError(f"the adapter does not fit model {model_path.name}: {error}") from error
    target.mkdir(parents=True)
    for path in sorted(model_path.iterdir()):
        if path.is_file() and path.suffix not in _OTHER_WEIGHTS and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)
    config = target / "config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    # Programs load all weights in the type that the configuration names.
    types = {name: dtype for name in ("dtype", "torch_dtype") if name in settings} or {"torch_dtype": dtype}
    config.write_text(json.dumps(settings | types, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _write_generation_config(model_path, target)
    from safetensors import safe_open
    from safetensors.torch import save_file

    for path in weight_files(model_path):
        with safe_open(path, framework="pt") as tensors:
            merged = dict(islice(weights, len(tensors.keys())))
        save_file(merged, target / path.name, metadata={"format": "pt"})


def _write_generation_config(model_path: Path, target: Path) -> None:
    """Write that a reply ends where replies of training do.

    Servers take their defaults from this file, and the policy was trained without a penalty or a cut of the
    distribution.
    """
    from transformers import AutoTokenizer

    file = target / "generation_config.json"
    settings = json.loads((file if file.is_file() else target / "config.json").read_text(encoding="utf-8"))
    kept = {name: settings[name] for name in settings if name.endswith("_token_id") or "version" in name}
    kept["eos_token_id"] = reply_ends(model_path, AutoTokenizer.from_pretrained(model_path))
    file.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _stem(name: str) -> str:
    """Return the common start of the names of a base weight's factors."""
    return _PREFIX + name.removesuffix(".weight")


class NativeAdapters:
    """The adapters of vLLM, one for each version.

    vLLM keys its prefix cache by name and folder, and never loads a number twice, so none of the three is used again.
    """

    def __init__(self, llm: "LLMEngine", merger: AdapterMerger) -> None:
        self._llm = llm
        self._merger = merger
        self._files: MemoryFolder | None = None
        self._loaded: dict[int, LoRARequest] = {}
        self._numbers = count(1)

    def write(self, version: int, digest: str, adapter: bytes) -> "LoRARequest":
        """Write an adapter's files, in any thread, and return the request that loads them.

        Raises ValueError if it does not fit this model, OSError if there is no room.
        """
        from vllm.lora.request import LoRARequest

        if self._files is None:
            self._files = MemoryFolder((MAX_LORAS + 1) * len(adapter))
        number = next(self._numbers)
        name = f"v{version}-{number}-{digest[:8]}"
        folder = self._files.path / name
        with named(folder):
            self._merger.write_adapter_folder(folder, adapter)
        return LoRARequest(name, number, str(folder))

    def load(self, version: int, written: "LoRARequest") -> None:
        if not self._llm.add_lora(written):
            raise RuntimeError(f"vLLM refused adapter version {version}")
        self._loaded[version] = written

    def request(self, version: int) -> "LoRARequest | None":
        return None if version == BASE_VERSION else self._loaded[version]

    def read_back(self, version: int) -> ReadBack:
        if version == BASE_VERSION:
            return ReadBack(given="", held="")
        loaded = self._loaded[version]
        read = partial(read_slots, number=loaded.lora_int_id, folder=Path(loaded.lora_path), scale=self._merger.scale)
        return together(self._llm.collective_rpc(read))

    def drop_unused(self, used: Set[int]) -> None:
        """Unload all other versions. vLLM would read a version in use from its files again, during a step."""
        for version in self._loaded.keys() - used:
            unused = self._loaded.pop(version)
            self._llm.remove_lora(unused.lora_int_id)
            shutil.rmtree(unused.lora_path, ignore_errors=True)

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
