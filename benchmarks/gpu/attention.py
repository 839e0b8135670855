"""The attention of the learner on a card: fused, by blocks, and padded as a plain trainer has it."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.facts import synchronize
from benchmarks.gpu.stage import Found, Stage, found

SIBLINGS = 6
SHARED = 0.4
"""Part of a tree's nodes that its siblings share."""


def attention(stage: Stage) -> Found:
    """One layer's attention, forward and backward: over a path and over a tree of six siblings."""
    from learner import tree_attention

    heads, kv_heads, width = (4, 2, 32) if stage.rehearsal else (32, 8, 128)
    lengths = (256,) if stage.rehearsal else (1024, 2048, 4096, 8192)
    compiles = stage.rehearsal or tree_attention.works(heads, kv_heads, width, torch.device(stage.device))
    with _kernel_of(stage):
        rows = [
            _measured(num_nodes, kind, heads, kv_heads, width, stage.device)
            for num_nodes in lengths
            for kind in ("path", "tree")
        ]
        errors = _errors(lengths[0], heads, kv_heads, width, stage.device)
    at = next(row for row in rows if row["kind"] == "tree" and row["nodes"] == min(4096, lengths[-1]))
    return found({**errors, "compiles": compiles, "tree_speedup": at["blocks_ms"] / at["fused_ms"]}, rows=rows)


@contextmanager
def _kernel_of(stage: Stage) -> Iterator[None]:
    """On a CPU the fused kernel is its definition in torch, which has gradients there."""
    from torch.nn.attention.flex_attention import flex_attention_hop

    from learner import tree_attention

    def uncompiled(
        query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, scale: float, enable_gqa: bool
    ) -> Any:
        score = lambda score, batch, head, query, key: score  # noqa: E731
        return flex_attention_hop(query, key, value, score, block_mask.as_tuple(), scale, {})[0]

    kernel = tree_attention.kernel
    if stage.rehearsal:
        tree_attention.kernel = lambda: uncompiled  # type: ignore[assignment]
    try:
        yield
    finally:
        tree_attention.kernel = kernel


def _blocks() -> Callable[..., Tensor]:
    from learner.tree_attention import attend_by_block

    return attend_by_block


def _ends(num_nodes: int, kind: str) -> np.ndarray:
    """The node after each one's last descendant, of a path or of siblings after a common beginning."""
    ends = np.full(num_nodes, num_nodes)
    if kind == "tree":
        shared = int(SHARED * num_nodes)
        borders = np.linspace(shared, num_nodes, SIBLINGS + 1).astype(int)
        for begin, end in pairwise(borders):
            ends[begin:end] = end
    return ends


def _inputs(num_nodes: int, heads: int, kv_heads: int, width: int, device: str, *, batch: int = 1) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(batch, count, num_nodes, width, generator=generator, device=device, dtype=torch.bfloat16)
        for count in (heads, kv_heads, kv_heads)
    ]


def _measured(num_nodes: int, kind: str, heads: int, kv_heads: int, width: int, device: str) -> dict[str, Any]:
    from learner.tree_attention import fused_attention, interval_mask

    ends, scale = _ends(num_nodes, kind), width**-0.5
    inputs = _inputs(num_nodes, heads, kv_heads, width, device)
    mask = interval_mask(ends, torch.device(device))
    length = num_nodes if kind == "path" else int(SHARED * num_nodes) + math.ceil((1 - SHARED) * num_nodes / SIBLINGS)
    padded = _inputs(length, heads, kv_heads, width, device, batch=1 if kind == "path" else SIBLINGS)
    ways = {
        "fused": (inputs, lambda *qkv: fused_attention(*qkv, mask, scale)),
        "blocks": (inputs, lambda *qkv: _blocks()(*qkv, ends, scale)),
        "padded": (padded, lambda *qkv: _dense(*qkv, scale)),
    }
    row: dict[str, Any] = {"kind": kind, "nodes": num_nodes, "padded_nodes": padded[0].shape[0] * length}
    for name, (given, attend) in ways.items():
        row |= _timed(name, attend, given, device)
    return row


def _dense(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )


def _timed(name: str, attend: Callable[..., Tensor], inputs: Sequence[Tensor], device: str) -> dict[str, float]:
    """Milliseconds of a pass forward and back, and the MiB that it takes beside its inputs."""
    repeats = 10 if device == "cuda" else 1
    for _ in range(3 if device == "cuda" else 0):
        _with_gradients(attend, inputs)
    synchronize(device)
    before = _reset_peak(device)
    started = time.perf_counter()
    for _ in range(repeats):
        _with_gradients(attend, inputs)
    synchronize(device)
    elapsed = (time.perf_counter() - started) / repeats
    return {f"{name}_ms": 1e3 * elapsed, f"{name}_mib": (_peak(device) - before) / 2**20}


def _with_gradients(attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), leaves)]


def _errors(num_nodes: int, heads: int, kv_heads: int, width: int, device: str) -> dict[str, float]:
    """The mean difference of outputs and gradients over a tree from those in float64, as a part of their mean size."""
    from learner.tree_attention import fused_attention, interval_mask

    ends, scale = _ends(num_nodes, "tree"), width**-0.5
    inputs = _inputs(num_nodes, heads, kv_heads, width, device)
    exact = _with_gradients(lambda *qkv: _exact(*qkv, ends, scale), [one.double() for one in inputs])
    mask = interval_mask(ends, torch.device(device))
    ways: dict[str, Callable[..., Tensor]] = {
        "fused_error": lambda *qkv: fused_attention(*qkv, mask, scale),
        "blocks_error": lambda *qkv: _blocks()(*qkv, ends, scale),
    }
    return {
        name: max(
            float((one.double() - other).abs().mean() / other.abs().mean())
            for one, other in zip(_with_gradients(attend, inputs), exact, strict=True)
        )
        for name, attend in ways.items()
    }


def _exact(query: Tensor, key: Tensor, value: Tensor, ends: np.ndarray, scale: float) -> Tensor:
    nodes = np.arange(len(ends))
    reads = torch.from_numpy((nodes[None] <= nodes[:, None]) & (nodes[:, None] < ends[None])).to(query.device)
    repeats = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(repeats, dim=1) for one in (key, value))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~reads, -math.inf)
    return torch.softmax(scores, dim=-1) @ value


def _reset_peak(device: str) -> float:
    if device == "cpu":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    return float(torch.cuda.memory_allocated())


def _peak(device: str) -> float:
    """Bytes: what the card's allocator held at most; on a CPU nothing counts them."""
    return float(torch.cuda.max_memory_allocated()) if device == "cuda" else 0.0
