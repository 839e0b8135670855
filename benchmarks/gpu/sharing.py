"""One copy of a model's weights between two processes, through CUDA IPC; in a rehearsal through shared memory.

The holder joins queries, keys and values, and gate and up, as vLLM holds them; the mapper reads the learner's parts as
slices of them, which are contiguous. Then either is killed.
"""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing as processes
from torch import Tensor

from benchmarks.gpu.stage import Found, Stage, found
from rollout.engines.base_weights import empty_joined, rows_of, separate

PATIENCE_S = 100
MARKED, MARK = "layers.0.self_attn.qkv_proj.weight", 7.0
"""The weight whose last entry the mapper writes, for the holder to see, and what it writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a layer: widths of hidden state, MLP, queries, and keys."""

    layers: int
    hidden: int
    intermediate: int
    query: int
    key: int


QWEN3_8B = Sizes(layers=36, hidden=4096, intermediate=12_288, query=4096, key=1024)
TINY = Sizes(layers=2, hidden=64, intermediate=96, query=64, key=32)


def sharing(stage: Stage) -> Found:
    sizes = TINY if stage.rehearsal else QWEN3_8B
    before = _used_gib(stage.device)
    holder = _Peer.start(_hold, sizes, stage.device)
    held = holder.ask("ready")
    holding = _used_gib(stage.device)
    mapper = _Peer.start(_map, sizes, stage.device)
    mapper.give(holder.ask("export"))
    seen = mapper.ask("sums")
    mapping = _used_gib(stage.device)
    mapper.ask("mark")
    one_memory = holder.ask("marked")
    mapper.kill()
    outlived = holder.ask("sums") == held
    second = _Peer.start(_map, sizes, stage.device)
    second.give(holder.ask("export"))
    again = second.ask("sums") == held
    holder.kill()
    orphan = second.try_ask("sums")
    second.kill()
    return found(
        {
            "bytes_equal": seen == held,
            "one_memory": one_memory,
            "holder_outlives_mapper": outlived,
            "mapped_again": again,
            "mapper_gib": mapping - holding,
            "freed_after_both": abs(_used_gib(stage.device) - before) < 0.5,
        },
        weights_gib=holding - before,
        mapper_after_the_holders_death="reads the same" if orphan == held else orphan,
    )


def _used_gib(device: str) -> float:
    if device == "cpu":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


class _Peer:
    """A process that answers questions, and may be killed."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe

    @classmethod
    def start(cls, target: Any, sizes: Sizes, device: str) -> "_Peer":
        # A process that has used a card cannot be forked; one that has not starts at once so.
        context = processes.get_context("spawn" if device == "cuda" else "fork")
        here, there = context.Pipe()
        process = context.Process(target=target, args=(there, sizes, device), daemon=True)
        process.start()
        there.close()
        return cls(process, here)

    def ask(self, question: str) -> Any:
        self._pipe.send(question)
        if not self._pipe.poll(PATIENCE_S):
            raise TimeoutError(f"no answer to '{question}' in {PATIENCE_S} s")
        return self._pipe.recv()

    def give(self, handles: Any) -> None:
        self._pipe.send(handles)
        self._pipe.recv()

    def try_ask(self, question: str) -> Any:
        """Its answer, or what went wrong."""
        try:
            return self.ask(question)
        except (OSError, EOFError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"

    def kill(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGKILL)
        self._process.join()


def _hold(pipe: Connection, sizes: Sizes, device: str) -> None:
    generator = torch.Generator(device).manual_seed(0)
    shapes, rows = _shapes(sizes), rows_of(_shapes(sizes))
    weights = empty_joined(shapes, rows, device=device, dtype=torch.bfloat16)
    for weight in weights.values():
        weight.normal_(generator=generator)
    answers = {
        "ready": lambda: _sums(separate(weights, rows)),
        "sums": lambda: _sums(separate(weights, rows)),
        "export": lambda: {name: _exported(weight) for name, weight in weights.items()},
        "marked": lambda: float(weights[MARKED][-1, -1]) == MARK and _unmark(weights),
    }
    while True:
        pipe.send(answers[pipe.recv()]())


def _shapes(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """Of the layers' linear weights, as transformers names them."""
    one = {
        "self_attn.q_proj": (sizes.query, sizes.hidden),
        "self_attn.k_proj": (sizes.key, sizes.hidden),
        "self_attn.v_proj": (sizes.key, sizes.hidden),
        "self_attn.o_proj": (sizes.hidden, sizes.query),
        "mlp.gate_proj": (sizes.intermediate, sizes.hidden),
        "mlp.up_proj": (sizes.intermediate, sizes.hidden),
        "mlp.down_proj": (sizes.hidden, sizes.intermediate),
    }
    return {f"layers.{number}.{name}.weight": shape for number in range(sizes.layers) for name, shape in one.items()}


def _exported(weight: Tensor) -> tuple[Any, Any]:
    """How another process comes to the same memory. A handle is good for one process, once."""
    from torch.multiprocessing.reductions import reduce_tensor

    build, arguments = reduce_tensor(weight)
    return build, arguments


def _unmark(weights: Mapping[str, Tensor]) -> bool:
    weights[MARKED][-1, -1] = 0.0
    return True


def _map(pipe: Connection, sizes: Sizes, device: str) -> None:
    weights = {name: build(*arguments) for name, (build, arguments) in pipe.recv().items()}
    rows = rows_of(_shapes(sizes))
    pipe.send(True)
    while True:
        if pipe.recv() == "mark":
            weights[MARKED][-1, -1] = MARK
            if device == "cuda":
                torch.cuda.synchronize()
            pipe.send(True)
        else:
            pipe.send(_sums(separate(weights, rows)))


def _sums(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Of all bytes of each weight but its last row, which is written to; equal weights have equal sums. Raises
    RuntimeError for a part that is no contiguous view."""
    sums = {}
    for name, weight in weights.items():
        if not weight.is_contiguous():
            raise RuntimeError(f"{name} is no contiguous view of what the holder joined")
        numbers = weight[:-1].view(torch.int16).long()
        sums[name] = int(numbers.mul(numbers + 1).sum())
    return sums
