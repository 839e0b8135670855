"""Attention over a packed prefix tree: a node reads its ancestors and nothing else. On a card in one fused kernel over
the whole row, on a CPU in blocks of nodes, each with the keys that one of them reads.

A dense mask would spend most of its work on pairs of siblings' branches that may not see each other.
Registered with transformers under the name `ATTENTION`; the plan travels with the forward call.

Nodes lie in preorder, so node q reads node k exactly if `k <= q < ends[k]`. torch compiles that comparison into its
attention kernel; which blocks of 128 by 128 nodes it may leave out, or need not ask about, follows from the least and
the largest of `ends` in each block.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from learner.packing import BLOCK_NODES

ATTENTION = "agentflow_tree"
BLOCK = 128
"""Nodes of a side of a block; rows are padded to a multiple."""
LEAST_BLOCKS = 2
"""Of a row. torch takes a length of one for a constant, and would compile a table of one block by itself."""
TRIAL = (3, 5)
"""Blocks of the two rows with which a card is tried: of two lengths, since every microbatch has another."""
LARGEST_ERROR = 0.03
"""Of a trial, in bfloat16, for outputs and gradients of about 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """Nodes `[start, end)` read the nodes `keys` `[K]`. `mask` `[end - start, K]` is added to the scores: 0 or -inf."""

    start: int
    end: int
    keys: Tensor
    mask: Tensor


def plan_attention(ends: np.ndarray, device: torch.device) -> tuple[AttentionBlock, ...]:
    """Cut a row into blocks of nodes with the keys that they use. `ends` `[N]`: node q reads node k exactly if
    `k <= q < ends[k]`."""
    blocks = []
    for start in range(0, len(ends), BLOCK_NODES):
        end = min(start + BLOCK_NODES, len(ends))
        keys = np.nonzero(ends[:end] > start)[0]
        nodes = np.arange(start, end)[:, None]
        reads = (keys <= nodes) & (nodes < ends[keys])
        blocks.append(
            AttentionBlock(
                start=start,
                end=end,
                keys=torch.from_numpy(keys).to(device),
                mask=torch.from_numpy(np.where(reads, np.float32(0), np.float32("-inf"))).to(device),
            )
        )
    return tuple(blocks)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    tree_blocks: Sequence[AttentionBlock] = (),
    tree_mask: BlockMask | None = None,
    tree_recompute: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    """query `[1, heads, N, d]`, key and value `[1, kv_heads, N, d]`; returns `[1, N, heads, d]`. With a `tree_mask`
    (`interval_mask`) in one kernel, else block by block.

    Every block keeps its own copy of the keys and values that it reads for the backward pass, together some
    N / 256 times the keys and values, and on a CPU its weights, `heads * N * K` numbers; with `tree_recompute` it makes
    them again there instead.
    """
    if tree_mask is not None:
        return fused_attention(query, key, value, tree_mask, scaling).transpose(1, 2), None
    attend = _attend_on_cpu if query.device.type == "cpu" else _attend
    parts = []
    for block in tree_blocks:
        inputs = block, query, key, value, scaling
        if tree_recompute:
            parts.append(checkpoint(attend, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(attend(*inputs))
    return torch.cat(parts, dim=2).transpose(1, 2), None


def attend_by_block(query: Tensor, key: Tensor, value: Tensor, ends: np.ndarray, scale: float) -> Tensor:
    """`[1, heads, N, d]`: what a kernel for the whole row must agree with."""
    blocks = plan_attention(ends, query.device)
    return torch.cat([_attend(block, query, key, value, scale) for block in blocks], dim=2)


def _attend(block: AttentionBlock, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`[1, heads, end - start, d]`: what the nodes of a block read, by torch's fused kernel."""
    repeats = query.shape[1] // key.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        query[:, :, block.start : block.end],
        key.index_select(2, block.keys).repeat_interleave(repeats, dim=1),
        value.index_select(2, block.keys).repeat_interleave(repeats, dim=1),
        attn_mask=block.mask.to(query.dtype)[None, None],
        scale=scale,
    )


def _attend_on_cpu(block: AttentionBlock, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The same in four products. The fused CPU kernel spends three times as long on the backward pass of such blocks,
    and would be given each key once per head that shares it."""
    _, heads, _, width = query.shape
    num_nodes, kv_heads = block.end - block.start, key.shape[1]
    shared = (kv_heads, heads // kv_heads * num_nodes, width)
    mask = block.mask.repeat(heads // kv_heads, 1)[None]
    read = _Attention.apply(
        query[0, :, block.start : block.end].reshape(shared),
        key[0].index_select(1, block.keys),
        value[0].index_select(1, block.keys),
        mask,
        scale,
    )
    return read.view(1, heads, num_nodes, width)


class _Attention(torch.autograd.Function):
    """Softmax(scale q k^T + mask) v for q `[B, Q, d]`, k and v `[B, K, d]`, mask `[1, Q, K]` in float32.

    Scores and softmax in float32 whatever q is in, as the fused kernels have them; products with the weights in q's.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            scores = torch.baddbmm(mask, query.float(), key.float().transpose(1, 2), alpha=scale)
            weights = torch.softmax(scores, dim=-1).to(value.dtype)
            ctx.save_for_backward(query, key, value, weights)
            ctx.scale = scale  # type: ignore[attr-defined]
            return torch.bmm(weights, value)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        query, key, value, weights = ctx.saved_tensors  # type: ignore[attr-defined]
        by_weight = torch.bmm(grad, value.transpose(1, 2)).float()
        held = weights.float()
        by_score = torch._softmax_backward_data(by_weight, held, -1, torch.float32)
        by_score = by_score.mul_(ctx.scale).to(query.dtype)  # type: ignore[attr-defined]
        return (
            torch.bmm(by_score, key),
            torch.bmm(by_score.transpose(1, 2), query),
            torch.bmm(weights.transpose(1, 2), grad),
            None,
            None,
        )


def register() -> str:
    """Make transformers know this attention; returns the name to load a model with."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, tree_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
    return ATTENTION


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


def works(heads: int, kv_heads: int, width: int, device: torch.device) -> bool:
    """Whether this card's compiler makes a kernel of these sizes that agrees with `attend_by_block`, forward and
    backward. Says in the log what went wrong."""
    try:
        error = max(_error(blocks * BLOCK, heads, kv_heads, width, device) for blocks in TRIAL)
    except Exception as failure:
        # The compiler's errors have no common type; all of them mean the same here.
        _fall_back(f"{type(failure).__name__}: {failure}".partition("\n")[0])
        return False
    if not error < LARGEST_ERROR:
        _fall_back(f"its error is {error:.3g}, at most {LARGEST_ERROR} is rounding")
        return False
    return True


def _error(num_nodes: int, heads: int, kv_heads: int, width: int, device: torch.device) -> float:
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
    expected = _with_gradients(lambda query, key, value: attend_by_block(query, key, value, ends, scale), inputs)
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
