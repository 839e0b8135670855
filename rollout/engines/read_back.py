"""Weights read back out of the engine's own memory: no engine is believed about what it holds.

Merged weights are read through the layers, since on a CPU vLLM keeps them in the form of its matrix kernels only: a
layer's answer to an input that is 1 in one place and 0 elsewhere is a column of its weights, to the bit. Native
adapters are read out of the slots that requests compute with.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NUM_COLUMNS = 8
"""Columns that are read of every merged matrix. A step size of 1e-6 changes one weight in some thousand of bfloat16, so
a single column could be equal in two versions."""

JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""The layers that vLLM computes as one, in the Llama, Qwen2 and Qwen3 families."""
WHOLE = {part: whole for whole, parts in JOINED.items() for part in parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """sha256 of the same weights as the engine was `given` them and as it `held` them; empty where there are none."""

    given: str
    held: str

    @property
    def fault(self) -> str | None:
        if not self.given:
            return "no weights could be read back out of the engine's memory"
        if self.given != self.held:
            return f"the engine's memory holds weights {self.held[:12]}, it was given {self.given[:12]}"
        return None


class MergedColumns:
    """Some columns of every matrix that adapters change, or that vLLM joins with one, as they were loaded.

    `targets` are names like `q_proj`.
    """

    def __init__(self, targets: Iterable[str]) -> None:
        self._targets = frozenset(part for one in targets for part in JOINED.get(WHOLE.get(one, ""), (one,)))
        self._given: dict[str, Tensor] = {}

    def kept(self, weights: "Iterable[tuple[str, Tensor]]") -> "Iterator[tuple[str, Tensor]]":
        """Yield the same weights; their columns are kept as they pass."""
        self._given = {}
        for name, weight in weights:
            module = name.removesuffix(".weight")
            if module != name and module.rpartition(".")[2] in self._targets:
                self._given[module] = weight[:, _columns(weight.shape[1])].T.clone()
            yield name, weight

    def read(self, model: Any) -> ReadBack:
        """Read the weights of vLLM's model in this process."""
        import torch

        left, given, held = set(self._given), hashlib.sha256(), hashlib.sha256()
        like = next(model.parameters())
        for name, layer in model.named_modules():
            modules = _modules_of(name, model.packed_modules_mapping)
            if not left.issuperset(modules):
                continue
            left.difference_update(modules)
            columns = _columns(layer.input_size)
            probe = torch.zeros(len(columns), layer.input_size, dtype=like.dtype, device=like.device)
            probe[torch.arange(len(columns)), columns] = 1
            with torch.no_grad():
                answer = layer.quant_method.apply(layer, probe, None)
            held.update(_bits(answer))
            given.update(_bits(torch.cat([self._given[module] for module in modules], dim=1).to(answer.dtype)))
        return _read_back(given, held, num_read=len(self._given) - len(left), missing=left)


def read_slots(worker: Any, *, number: int, folder: Path, scale: float) -> ReadBack:
    """Compare the slots with which vLLM's `worker` computes an adapter's requests with its PEFT folder.

    Parts of a joined layer that the adapter does not change must be empty.
    """
    import safetensors.torch

    manager = worker.model_runner.lora_manager._adapter_manager
    slot = manager.lora_index_to_id.index(number)
    factors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    left, given, held = set(factors), hashlib.sha256(), hashlib.sha256()
    for name, layer in manager.modules.items():
        names = [f"base_model.model.{one}.lora_" for one in _modules_of(name, manager.packed_modules_mapping)]
        own = {one for one in names if left.issuperset((f"{one}A.weight", f"{one}B.weight"))}
        if not own:
            continue
        left.difference_update(one + factor for one in own for factor in ("A.weight", "B.weight"))
        dtype = layer.lora_a_stacked[0].dtype
        a = [factors[f"{one}A.weight"].to(dtype) if one in own else None for one in names]
        b = [factors[f"{one}B.weight"].to(dtype) * scale if one in own else None for one in names]
        if layer.tp_size > 1:
            a, b = _share(layer.slice_lora_a, a), _share(layer.slice_lora_b, b)
        for tensor, slots in zip([*a, *b], [*layer.lora_a_stacked, *layer.lora_b_stacked], strict=True):
            expected = slots.new_zeros(slots.shape[2:]) if tensor is None else tensor
            held.update(_bits(slots[slot, 0, : expected.shape[0], : expected.shape[1]]))
            given.update(_bits(expected))
    return _read_back(given, held, num_read=len(factors) - len(left), missing=left)


def together(parts: Sequence[ReadBack]) -> ReadBack:
    """Combine the results of all tensor-parallel workers."""
    if len(parts) == 1:
        return parts[0]
    given, held = ("".join(one.given for one in parts), "".join(one.held for one in parts))
    return ReadBack(given=hashlib.sha256(given.encode()).hexdigest(), held=hashlib.sha256(held.encode()).hexdigest())


def _read_back(given: "hashlib._Hash", held: "hashlib._Hash", *, num_read: int, missing: Iterable[str]) -> ReadBack:
    """Return the digests; weights that were given and are missing in the model are not held."""
    given.update(" ".join(sorted(missing)).encode())
    return ReadBack(given=given.hexdigest(), held=held.hexdigest()) if num_read else ReadBack(given="", held="")


def _modules_of(name: str, packed: dict[str, list[str]]) -> list[str]:
    """Return the base model's modules that vLLM holds as this one."""
    stem, dot, last = name.rpartition(".")
    return [f"{stem}{dot}{part}" for part in packed.get(last) or [last]]


def _columns(num: int) -> "Tensor":
    """Return the same columns in every process, so that the results of two engines can be compared."""
    import torch

    return torch.randperm(num, generator=torch.Generator().manual_seed(num))[:NUM_COLUMNS]


def _share(slice_of: Any, factors: "list[Tensor | None]") -> "list[Tensor | None]":
    """Return a rank's part of an adapter's factors; vLLM cuts those of packed layers together."""
    return list(slice_of(factors)) if len(factors) > 1 else [slice_of(factors[0])]


def _bits(tensor: "Tensor") -> bytes:
    """Return the bytes of a tensor without the sign of zero and without values too small for a kernel to keep."""
    import torch

    kept = torch.nn.functional.hardshrink(tensor.float(), torch.finfo(tensor.dtype).tiny)
    return bytes(kept.to(tensor.dtype).cpu().contiguous().view(torch.uint8).numpy())
