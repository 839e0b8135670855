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
    attend = _attend_on_cpu if query.device.type == "cpu" else _attend_on_card
    return attend(query, key, value, tree_blocks, scaling, tree_recompute), None


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


def _attend_on_card(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[AttentionBlock], scale: float, recompute: bool
) -> Tensor:
    attend: Callable[..., Tensor] = _attend
    if recompute:
        attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([attend(block, query, key, value, scale) for block in blocks], dim=2).transpose(1, 2)


def _attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[AttentionBlock], scale: float, recompute: bool
) -> Tensor:
    """Compute the same in products.

    torch's fused CPU kernel takes three times as long for the backward pass, and copies keys that heads share.
    """
    result: Tensor = _Attention.apply(query, key, value, blocks, scale, recompute)
    return result


class _Attention(torch.autograd.Function):
    """Softmax(scale q k^T + mask) v of all blocks: `[1, N, heads, d]`.

    Scores and softmax are in float32, as in the fused kernels; products with the weights are in v's type. Gradients of
    all blocks are added in one tensor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        blocks: Sequence[AttentionBlock],
        scale: float,
        recompute: bool,
    ) -> Tensor:
        _, heads, num_nodes, width = query.shape
        # Selecting from other layouts would copy everything for each block.
        key, value = key.contiguous(), value.contiguous()
        result = query.new_empty(num_nodes, len(key[0]), heads // len(key[0]), width)
        kept = []
        for block in blocks:
            weights = _weights(block, query, key, scale).to(value.dtype)
            read = torch.bmm(weights, value[0].index_select(1, block.keys))
            _of_nodes(result, block).copy_(read.view_as(_of_nodes(result, block)))
            kept += [] if recompute else [weights]
        ctx.save_for_backward(query, key, value, *kept)
        ctx.blocks, ctx.scale = blocks, scale
        return result.view(1, num_nodes, heads, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        _, heads, num_nodes, width = query.shape
        grouped = grads[0].reshape(num_nodes, len(key[0]), heads // len(key[0]), width)
        by_query, by_key, by_value = torch.empty_like(grouped), torch.zeros_like(key), torch.zeros_like(value)
        for number, block in enumerate(ctx.blocks):
            weights = kept[number] if kept else _weights(block, query, key, ctx.scale).to(value.dtype)
            queries, grad = _queries(block, query, key), _of_nodes(grouped, block).reshape(*weights.shape[:2], width)
            keys, values = (one[0].index_select(1, block.keys) for one in (key, value))
            by_weight = torch.bmm(grad, values.transpose(1, 2)).float()
            by_score = torch._softmax_backward_data(by_weight, weights.float(), -1, torch.float32).to(query.dtype)
            _of_nodes(by_query, block).copy_(torch.bmm(by_score, keys).view_as(_of_nodes(by_query, block)))
            by_key[0].index_add_(1, block.keys, torch.bmm(by_score.transpose(1, 2), queries))
            by_value[0].index_add_(1, block.keys, torch.bmm(weights.transpose(1, 2), grad))
        by_query = by_query.view(1, num_nodes, heads, width).transpose(1, 2)
        return by_query.mul_(ctx.scale), by_key.mul_(ctx.scale), by_value, None, None, None


def _of_nodes(grouped: Tensor, block: AttentionBlock) -> Tensor:
    """Return the part of a block of `[N, kv_heads, heads per kv_head, d]`: `[kv_heads, heads per kv_head, Q, d]`."""
    return grouped[block.start : block.end].permute(1, 2, 0, 3)


def _queries(block: AttentionBlock, query: Tensor, key: Tensor) -> Tensor:
    """Return `[kv_heads, heads per kv_head * Q, d]`."""
    return query[0, :, block.start : block.end].reshape(len(key[0]), -1, query.shape[-1])


def _weights(block: AttentionBlock, query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return the float32 weights of a block, `[kv_heads, heads per kv_head * Q, K]`."""
    keys = key[0].index_select(1, block.keys).float()
    scores = torch.bmm(_queries(block, query, key).float() * scale, keys.transpose(1, 2))
    scores.view(len(keys), -1, *block.mask.shape).add_(block.mask)
    return torch.softmax(scores, dim=-1)


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
