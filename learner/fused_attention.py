"""The tree's attention on a card: one fused kernel over the whole row, with one integer per node instead of a mask.

Nodes lie in preorder, so node q reads node k exactly if `k <= q < ends[k]`. torch compiles that comparison into its
attention kernel; which blocks of 128 by 128 nodes it may leave out, or need not ask about, follows from the least and
the largest of `ends` in each block.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
"""Nodes of a side of a block; rows are padded to a multiple."""
LEAST_BLOCKS = 2
"""Of a row. torch takes a length of one for a constant, and would compile a table of one block by itself."""
TRIAL = (3, 5)
"""Blocks of the two rows with which a card is tried: of two lengths, since every microbatch has another."""
LARGEST_ERROR = 0.03
"""Of a trial, in bfloat16, for outputs and gradients of about 1."""


def padded_ends(ends: np.ndarray) -> np.ndarray:
    """`ends` `[N]` with as many nodes more as a multiple of 128 wants, 256 at least. They read themselves and nobody
    reads them."""
    num_nodes = max(LEAST_BLOCKS, -(-len(ends) // BLOCK)) * BLOCK
    return np.concatenate([ends, np.arange(len(ends), num_nodes) + 1])


def interval_mask(ends: np.ndarray, device: torch.device) -> BlockMask:
    """For padded `ends` `[N]`: the comparison, and the table of blocks, `[N / 128, N / 128]` small integers."""
    first, last = (reduced.reduce(ends.reshape(-1, BLOCK), axis=1) for reduced in (np.minimum, np.maximum))
    starts = np.arange(0, len(ends), BLOCK)
    before = starts[None, :] < starts[:, None]
    full = before & (first[None, :] >= starts[:, None] + BLOCK)
    partial = (before & (last[None, :] > starts[:, None]) & ~full) | np.eye(len(starts), dtype=bool)
    on_device = torch.from_numpy(ends).to(device=device, dtype=torch.int32)

    def reads(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < on_device[key])

    return BlockMask.from_kv_blocks(*_listed(partial, device), *_listed(full, device), BLOCK_SIZE=BLOCK, mask_mod=reads)


def _listed(chosen: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, `[1, 1, B]`, and which, first in its row `[1, 1, B, B]`."""
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    counts = chosen.sum(axis=1).astype(np.int32)
    return torch.from_numpy(counts).to(device)[None, None], torch.from_numpy(order).to(device)[None, None]


def fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """query `[1, heads, N, d]`, key and value `[1, kv_heads, N, d]`, N a multiple of 128; returns
    `[1, heads, N, d]`. Keys and values are read once for all heads that share them, and never copied."""
    dtype = value.dtype
    return kernel()(query.to(dtype), key.to(dtype), value, block_mask=mask, scale=scale, enable_gqa=True)


@cache
def kernel() -> Callable[..., Any]:
    """Compiled at its first use and for all lengths."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def works(reference: Callable[..., Tensor], heads: int, kv_heads: int, width: int, device: torch.device) -> bool:
    """Whether this card's compiler makes a kernel of these sizes that agrees with `reference(query, key, value, ends,
    scale)`, forward and backward. Says in the log what went wrong."""
    try:
        error = max(_error(reference, blocks * BLOCK, heads, kv_heads, width, device) for blocks in TRIAL)
    except Exception as failure:
        # The compiler's errors have no common type; all of them mean the same here.
        _fall_back(f"{type(failure).__name__}: {failure}".partition("\n")[0])
        return False
    if not error < LARGEST_ERROR:
        _fall_back(f"its error is {error:.3g}, at most {LARGEST_ERROR} is rounding")
        return False
    return True


def _error(
    reference: Callable[..., Tensor], num_nodes: int, heads: int, kv_heads: int, width: int, device: torch.device
) -> float:
    """The largest difference of outputs and gradients, over two siblings with a common beginning."""
    ends = np.full(num_nodes, num_nodes)
    ends[num_nodes // 3 : num_nodes // 2] = num_nodes // 2
    generator = torch.Generator(device).manual_seed(0)
    inputs = [
        torch.randn(1, count, num_nodes, width, generator=generator, device=device, dtype=torch.bfloat16)
        for count in (heads, kv_heads, kv_heads)
    ]
    scale = width**-0.5
    mask = interval_mask(ends, device)
    found = _with_gradients(lambda query, key, value: fused_attention(query, key, value, mask, scale), inputs)
    expected = _with_gradients(lambda *qkv: reference(*qkv, ends, scale), inputs)
    return max(
        float((one.float() - other.float()).abs().max() / other.float().abs().max())
        for one, other in zip(found, expected, strict=True)
    )


def _with_gradients(attend: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in inputs]
    with torch.enable_grad():
        output = attend(*leaves)
        return [output.detach(), *torch.autograd.grad(output.float().square().sum(), leaves)]


def _fall_back(why: str) -> None:
    logging.getLogger(__name__).warning("attention goes block by block, more slowly: the fused kernel failed, %s", why)
