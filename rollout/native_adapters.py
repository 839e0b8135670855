"""The adapters that vLLM holds beside the base weights: one for each version that something samples with."""

import shutil
from collections.abc import Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollout.engine import BASE_VERSION
from rollout.memory_folder import MemoryFolder
from rollout.merging import AdapterMerger
from rollout.read_back import ReadBack, read_slots, together
from rollout.vllm_parts import lora_request


@dataclass(frozen=True, slots=True)
class _Held:
    request: Any
    folder: Path


class NativeAdapters:
    """Each version has a name, a number and a folder of its own, none of which is ever used again: vLLM keys its prefix
    cache by name and folder, and takes a number that it knows for weights that it has."""

    def __init__(self, llm: Any, merger: AdapterMerger) -> None:
        self._llm = llm
        self._merger = merger
        self._memory = MemoryFolder()
        self._root = self._memory.path
        self._held: dict[int, _Held] = {}
        self._next_id = 1

    def load(self, version: int, digest: str, adapter: bytes) -> None:
        folder = self._root / f"v{version}-{self._next_id}-{digest[:8]}"
        self._merger.write_adapter_folder(folder, adapter)
        request = lora_request(folder.name, self._next_id, folder)
        self._next_id += 1
        if not self._llm.add_lora(request):
            raise RuntimeError(f"vLLM refused adapter version {version}")
        self._held[version] = _Held(request=request, folder=folder)

    def request(self, version: int) -> Any | None:
        """What a request that samples with `version` is given; None for the base model, and for nothing else: an
        adapter that is missing is an error."""
        return None if version == BASE_VERSION else self._held[version].request

    def read_back(self, version: int) -> ReadBack:
        """What vLLM's slots hold as `version`."""
        if version == BASE_VERSION:
            return ReadBack(given="", held="")
        held = self._held[version]
        read = partial(read_slots, number=held.request.lora_int_id, folder=held.folder, scale=self._merger.scale)
        return together(self._llm.collective_rpc(read))

    def drop_unused(self, used: Set[int]) -> None:
        """Forget every version but these. One in use would be read from its folder again, in the middle of a step."""
        for version in self._held.keys() - used:
            held = self._held.pop(version)
            self._llm.remove_lora(held.request.lora_int_id)
            shutil.rmtree(held.folder, ignore_errors=True)

    def close(self) -> None:
        self._memory.close()
