"""One copy of a model's weights between two processes, through CUDA IPC; in a rehearsal through shared memory.

The holder joins queries, keys and values, and gate and up, as vLLM holds them; the mapper reads the learner's parts as
slices of them, which are contiguous. Then either is killed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.facts import synchronize
from benchmarks.gpu.peer import Peer, serve
from benchmarks.gpu.stage import Found, Stage, found
from rollout.engines.base_weights import empty_joined, rows_of, separate

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
    before = used_gib(stage.device)
    holder = Peer.start(_hold, sizes, stage.device, forked=stage.rehearsal)
    held = holder.ask("ready")
    holding = used_gib(stage.device)
    mapper = Peer.start(_map, sizes, stage.device, forked=stage.rehearsal)
    mapper.ask("map", holder.ask("export"))
    seen = mapper.ask("sums")
    mapping = used_gib(stage.device)
    mapper.ask("mark")
    one_memory = holder.ask("marked")
    mapper.kill()
    outlived = holder.ask("sums") == held
    second = Peer.start(_map, sizes, stage.device, forked=stage.rehearsal)
    second.ask("map", holder.ask("export"))
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
            "freed_after_both": abs(used_gib(stage.device) - before) < 0.5,
        },
        weights_gib=holding - before,
        mapper_after_the_holders_death="reads the same" if orphan == held else orphan,
    )


def used_gib(device: str) -> float:
    if device == "cpu":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


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
    serve(pipe, answers)


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
    weights: dict[str, Tensor] = {}
    rows = rows_of(_shapes(sizes))

    def mark() -> None:
        weights[MARKED][-1, -1] = MARK
        synchronize(device)

    answers = {
        "map": lambda handles: weights.update({name: build(*given) for name, (build, given) in handles.items()}),
        "sums": lambda: _sums(separate(weights, rows)),
        "mark": mark,
    }
    serve(pipe, answers)


def _sums(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Of all bytes of each weight but its last row, which is written to; equal weights have equal sums. Raises
    RuntimeError for a part that is no contiguous view."""
    sums = {}
    for name, weight in weights.items():
        if not weight.is_contiguous():
            raise RuntimeError(f"{name} is no contiguous view of what the holder joined")
        numbers = weight[:-1].view(torch.int16).long()
        sums[name] = int(numbers.mul(numbers + 1).sum())
    del numbers
    torch.cuda.empty_cache()
    return sums
