"""vLLM's memory without vLLM: a model of two layers whose merged weights or adapter slots can be left as they were."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from rollout.engines.adapters import AdapterMerger
from rollout.engines.read_back import MergedColumns, ReadBack, read_slots

HIDDEN, RANK, SCALE = 128, 4, 2.0
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
SLOT = 1


def save_base(folder: Path, generator: torch.Generator) -> AdapterMerger:
    """A base model's file; returns what merges adapters with it."""
    names = [f"model.layers.{layer}.self_attn.{one}.weight" for layer in range(2) for one in TARGETS]
    weights = {name: (0.05 * torch.randn(HIDDEN, HIDDEN, generator=generator)).bfloat16() for name in names}
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    return AdapterMerger(folder, SCALE)


def adapter_versions(
    generator: torch.Generator, *, step_size: float, count: int, targets: Sequence[str] = TARGETS
) -> list[bytes]:
    """Adapters that an optimizer would leave: each parameter moves by about the step size from one to the next. The
    first is that of a cold start, of some hundred larger steps."""
    names = [
        f"base_model.model.model.layers.{layer}.self_attn.{one}.lora_{factor}.weight"
        for layer in range(2)
        for one in targets
        for factor in "AB"
    ]
    tensors = {
        name: torch.randn((RANK, HIDDEN) if "lora_A" in name else (HIDDEN, RANK), generator=generator)
        * (0.05 if "lora_A" in name else 0.004)
        for name in names
    }
    versions = []
    for _ in range(count):
        versions.append(safetensors.torch.save(tensors))
        tensors = {name: one + step_size * torch.randn(one.shape, generator=generator) for name, one in tensors.items()}
    return versions


@dataclass(slots=True)
class MergedMemory:
    """Layers as vLLM holds them on a CPU: their weights are seen in their answers only."""

    merger: AdapterMerger
    columns: MergedColumns = field(default_factory=lambda: MergedColumns(TARGETS))
    layers: dict[str, Any] = field(default_factory=dict)
    packed_modules_mapping = PACKED

    def load(self, given: bytes, *, held: bytes | None = None) -> ReadBack:
        """What is read back after `given` was loaded, where the layers hold `held` in its place."""
        weights = dict(self.columns.kept(self.merger.merged_weights(given)))
        if held is not None:
            weights = dict(self.merger.merged_weights(held))
        self.layers = {}
        for layer in range(2):
            stem = f"model.layers.{layer}.self_attn"
            qkv = torch.cat([weights[f"{stem}.{one}.weight"] for one in PACKED["qkv_proj"]])
            self.layers |= {f"{stem}.qkv_proj": _layer(qkv), f"{stem}.o_proj": _layer(weights[f"{stem}.o_proj.weight"])}
        return self.columns.read(self)

    def parameters(self) -> Iterator[Tensor]:
        yield torch.zeros(1, dtype=torch.bfloat16)

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        yield "", self
        yield from self.layers.items()


def read_native(folder: Path, given: bytes, held: bytes) -> ReadBack:
    """What is read back of slots that hold `held`, where `given` was loaded."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(given)
    factors = safetensors.torch.load(held)
    modules = {}
    for layer in range(2):
        stem = f"model.layers.{layer}.self_attn"
        for name, parts in (("qkv_proj", PACKED["qkv_proj"]), ("o_proj", ["o_proj"])):
            found = [f"base_model.model.{stem}.{part}.lora_" for part in parts]
            modules[f"{stem}.{name}"] = SimpleNamespace(
                tp_size=1,
                lora_a_stacked=[_slots(factors.get(f"{one}A.weight"), (2 * RANK, HIDDEN)) for one in found],
                lora_b_stacked=[_slots(factors.get(f"{one}B.weight"), (HIDDEN, 2 * RANK), SCALE) for one in found],
            )
    manager = SimpleNamespace(lora_index_to_id=[None, 7], modules=modules, packed_modules_mapping=PACKED)
    worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager)))
    return read_slots(worker, number=7, folder=folder, scale=SCALE)


def _layer(weight: Tensor) -> Any:
    def apply(_: Any, inputs: Tensor, bias: None) -> Tensor:
        return torch.nn.functional.linear(inputs, weight)

    return SimpleNamespace(input_size=weight.shape[1], quant_method=SimpleNamespace(apply=apply))


def _slots(tensor: Tensor | None, shape: tuple[int, int], scale: float = 1.0) -> Tensor:
    """Two slots, larger than the adapter, of which it is in the second; empty ones where it has no such factor."""
    slots = torch.zeros(2, 1, *shape, dtype=torch.bfloat16)
    if tensor is not None:
        slots[SLOT, 0, : tensor.shape[0], : tensor.shape[1]] = tensor.bfloat16() * scale
    return slots
