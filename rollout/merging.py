"""Adapter bytes to what an engine loads: merged weights, or a PEFT folder."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PREFIX = "base_model.model."


class AdapterMerger:
    """Knows the base model's files; computes W0 + scale * B A from the untouched W0 for every version."""

    def __init__(self, model_path: Path, scale: float) -> None:
        self._model_path = model_path
        self._scale = scale

    def merged_weights(self, adapter: bytes) -> Iterator[tuple[str, Any]]:
        """Every base weight by its Hugging Face name, the adapter folded in where it has one."""
        import safetensors.torch
        import torch

        factors = safetensors.torch.load(adapter)
        for name, weight in self.base_weights():
            stem = _PREFIX + name.removesuffix(".weight")
            a, b = factors.pop(f"{stem}.lora_A.weight", None), factors.pop(f"{stem}.lora_B.weight", None)
            if a is None or b is None:
                yield name, weight
                continue
            delta = (b.to(torch.float32) @ a.to(torch.float32)) * self._scale
            yield name, (weight.to(torch.float32) + delta).to(weight.dtype)
        if factors:
            raise ValueError(f"the adapter has weights the base model lacks: {sorted(factors)[:3]}")

    def base_weights(self) -> Iterator[tuple[str, Any]]:
        from safetensors import safe_open

        for file in sorted(self._model_path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    yield name, tensors.get_tensor(name)

    def write_adapter_folder(self, version: int, digest: str, adapter: bytes) -> Path:
        """The adapter as a PEFT folder that appears whole or not at all."""
        import safetensors.torch

        factors = safetensors.torch.load(adapter)
        rank = next(tensor.shape[0] for name, tensor in factors.items() if "lora_A" in name)
        targets = sorted({name.split(".lora_")[0].rsplit(".", 1)[1] for name in factors})
        folder = Path(tempfile.gettempdir()) / f"agentflow-{os.getpid()}-v{version}-{digest[:8]}"
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "adapter_model.safetensors").write_bytes(adapter)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self._model_path),
            "r": rank,
            "lora_alpha": self._scale * rank,
            "target_modules": targets,
            "bias": "none",
        }
        (partial / "adapter_config.json").write_text(json.dumps(config))
        partial.rename(folder)
        return folder
