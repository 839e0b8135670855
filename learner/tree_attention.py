"""Attention over a packed prefix tree, in which a node reads itself and its ancestors.

On a card one fused kernel computes the whole row; on a CPU it is computed in blocks of nodes, each with the keys that
one of its nodes reads. Nodes are in preorder, so node q reads node k exactly if `k <= q < ends[k]`. torch compiles that
comparison into its attention kernel. The least and the largest of `ends` in each block decide which blocks of 128 by
128 nodes the kernel may skip, or compute without the comparison.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from learner.packing import BLOCK_NODES

ATTENTION = "agentflow_tree"
BLOCK = 128
"""Side of a block of the fused kernel. Rows are padded to a multiple."""
LEAST_BLOCKS = 2
"""Of a row: torch treats a length of one as a constant and would compile another kernel for it."""
TRIAL = (3, 5)
"""Blocks of the two rows of a trial: microbatches have many lengths."""
LARGEST_ERROR = 0.03
"""In a trial, in bfloat16, of outputs and gradients of about 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """The nodes `[start, end)`, the nodes `[K]` that they read, and what is added to their scores, 0 or -inf."""

    start: int
    end: int
    keys: Tensor
    mask: Tensor
    """`[end - start, K]`."""


def plan_attention(ends: np.ndarray, device: torch.device) -> tuple[AttentionBlock, ...]:
    """Cut a row with these `ends` `[N]` into blocks of nodes with the keys that they read."""
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
    """Compute the attention of query `[1, heads, N, d]` over key and value `[1, kv_heads, N, d]`: `[1, N, heads, d]`.

    Uses one kernel with a `tree_mask`, and `tree_blocks` otherwise. Each block keeps a copy of its keys and values for
    the backward pass, and on a CPU its weights, `heads * N * K` numbers; `tree_recompute` computes them again instead.
    """
    if tree_mask is not None:
        return fused_attention(query, key, value, tree_mask, scaling).transpose(1, 2), None
    attend: Callable[..., Tensor] = _attend_on_cpu if query.device.type == "cpu" else _attend
    if tree_recompute:
        attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
    parts = [attend(block, query, key, value, scaling) for block in tree_blocks]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def attend_by_block(query: Tensor, key: Tensor, value: Tensor, ends: np.ndarray, scale: float) -> Tensor:
    """Compute the attention `[1, heads, N, d]` block by block, as the reference of the fused kernel."""
    blocks = plan_attention(ends, query.device)
    return torch.cat([_attend(block, query, key, value, scale) for block in blocks], dim=2)


def _attend(block: AttentionBlock, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute the attention `[1, heads, end - start, d]` of a block with torch's fused kernel."""
    repeats = query.shape[1] // key.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        query[:, :, block.start : block.end],
        key.index_select(2, block.keys).repeat_interleave(repeats, dim=1),
        value.index_select(2, block.keys).repeat_interleave(repeats, dim=1),
        attn_mask=block.mask.to(query.dtype)[None, None],
        scale=scale,
    )


def _attend_on_cpu(block: AttentionBlock, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute the same in four products.

    torch's fused CPU kernel takes three times as long for the backward pass, and copies keys that heads share.
    """
    _, heads, _, width = query.shape
    num_nodes, kv_heads = block.end - block.start, key.shape[1]
    shared = (kv_heads, heads // kv_heads * num_nodes, width)
    mask = block.mask.repeat(heads // kv_heads, 1)[None]
    output = _Attention.apply(
        query[0, :, block.start : block.end].reshape(shared),
        key[0].index_select(1, block.keys),
        value[0].index_select(1, block.keys),
        mask,
        scale,
    )
    return output.view(1, heads, num_nodes, width)


class _Attention(torch.autograd.Function):
    """Softmax(scale q k^T + mask) v for q `[B, Q, d]`, k and v `[B, K, d]`, mask `[1, Q, K]` in float32.

    Scores and softmax are in float32, as in the fused kernels; products with the weights are in q's type.
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
        by_score = torch._softmax_backward_data(by_weight, weights.float(), -1, torch.float32)
        by_score = by_score.mul_(ctx.scale).to(query.dtype)  # type: ignore[attr-defined]
        return (
            torch.bmm(by_score, key),
            torch.bmm(by_score.transpose(1, 2), query),
            torch.bmm(weights.transpose(1, 2), grad),
            None,
            None,
        )


def register() -> str:
    """Register this attention with transformers, and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, tree_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
    return ATTENTION


def padded_ends(ends: np.ndarray) -> np.ndarray:
    """Return `ends` `[N]` padded to a multiple of 128, at least 256. Padding nodes read only themselves."""
    num_nodes = max(LEAST_BLOCKS, -(-len(ends) // BLOCK)) * BLOCK
    return np.concatenate([ends, np.arange(len(ends), num_nodes) + 1])


def interval_mask(ends: np.ndarray, device: torch.device) -> BlockMask:
    """Return the mask of padded `ends` `[N]`: the comparison and the table of `[N / 128, N / 128]` blocks."""
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
    """Return the number of chosen key blocks per query block, `[1, 1, B]`, and rows that list them first."""
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    counts = chosen.sum(axis=1).astype(np.int32)
    return torch.from_numpy(counts).to(device)[None, None], torch.from_numpy(order).to(device)[None, None]


def fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Compute the attention of query `[1, heads, N, d]` over key and value `[1, kv_heads, N, d]`: `[1, heads, N, d]`.

    N is a multiple of 128. Keys and values are read once for all heads that share them.
    """
    dtype = value.dtype
    return kernel()(query.to(dtype), key.to(dtype), value, block_mask=mask, scale=scale, enable_gqa=True)


@cache
def kernel() -> Callable[..., Any]:
    """Return the kernel, which is compiled at its first use, for all lengths."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def works(heads: int, kv_heads: int, width: int, device: torch.device) -> bool:
    """Return whether this card's kernel for these sizes agrees with `attend_by_block`, forward and backward."""
    try:
        error = max(_error(blocks * BLOCK, heads, kv_heads, width, device) for blocks in TRIAL)
    except Exception as failure:
        # The compiler's errors have no common type.
        problem = f"{type(failure).__name__}: {failure}".partition("\n")[0]
    else:
        if error < LARGEST_ERROR:
            return True
        problem = f"its error is {error:.3g}, and rounding makes at most {LARGEST_ERROR}"
    logging.getLogger(__name__).warning("attention uses blocks, which is slower: the fused kernel failed, %s", problem)
    return False


def _error(num_nodes: int, heads: int, kv_heads: int, width: int, device: torch.device) -> float:
    """Return the largest relative difference of outputs and gradients, for two siblings with a common prefix."""
    ends = np.full(num_nodes, num_nodes)
    ends[num_nodes // 3 : num_nodes // 2] = num_nodes // 2
    generator = torch.Generator(device).manual_seed(0)
    inputs = [
        torch.randn(1, count, num_nodes, width, generator=generator, device=device, dtype=torch.bfloat16)
        for count in (heads, kv_heads, kv_heads)
    ]
    scale = width**-0.5
    mask = interval_mask(ends, device)
    fused = _with_gradients(lambda query, key, value: fused_attention(query, key, value, mask, scale), inputs)
    expected = _with_gradients(lambda query, key, value: attend_by_block(query, key, value, ends, scale), inputs)
    return max(
        float((actual.float() - exact.float()).abs().max() / exact.float().abs().max())
        for actual, exact in zip(fused, expected, strict=True)
    )


def _with_gradients(attend: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        output = attend(*leaves)
        return [output.detach(), *torch.autograd.grad(output.float().square().sum(), leaves)]
