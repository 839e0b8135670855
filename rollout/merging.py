"""Adapter bytes to what an engine loads: merged weights, or a PEFT folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


class AdapterMerger:
    """Knows the base model's files; computes W0 + scale * B A from the untouched W0 for every version."""

    def __init__(self, model_path: Path, scale: float) -> None:
        self._model_path = model_path
        self.scale = scale

    def merged_weights(self, adapter: bytes) -> Iterator[tuple[str, Any]]:
        """Every base weight by its Hugging Face name, the adapter folded in where it has one. Raises ValueError before
        the first of them when the adapter does not fit: a model that is replaced by half is none."""
        return self._merged(self._factors(adapter))

    def base_weights(self) -> Iterator[tuple[str, Any]]:
        for name, tensors in self._files():
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

    def _merged(self, factors: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        import torch

        for name, weight in self.base_weights():
            stem = _stem(name)
            if stem + _A not in factors:
                yield name, weight
                continue
            a, b = factors[stem + _A].to(torch.float32), factors[stem + _B].to(torch.float32)
            yield name, (weight.to(torch.float32) + (b @ a) * self.scale).to(weight.dtype)

    def _factors(self, adapter: bytes) -> dict[str, Any]:
        """The tensors of an adapter of this model."""
        import safetensors.torch

        try:
            factors = safetensors.torch.load(adapter)
        except safetensors.SafetensorError as error:
            raise ValueError(f"these bytes are no adapter: {error}") from error
        stems = {name.removesuffix(_A).removesuffix(_B) for name in factors}
        if missing := {stem + end for stem in stems for end in (_A, _B)} - factors.keys():
            raise ValueError(f"the adapter lacks {sorted(missing)[:3]}")
        if strange := stems - {_stem(name) for name, _ in self._files()}:
            raise ValueError(f"the adapter has weights the base model lacks: {sorted(strange)[:3]}")
        return factors

    def _files(self) -> Iterator[tuple[str, Any]]:
        """The name of every base weight, and the open file that holds it."""
        from safetensors import safe_open

        for file in sorted(self._model_path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    yield name, tensors


def _stem(name: str) -> str:
    """What the factors of a base weight are called."""
    return _PREFIX + name.removesuffix(".weight")
