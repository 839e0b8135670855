"""Attention over a packed prefix tree: a node reads its ancestors and nothing else. On a card in one kernel
(`fused_attention`), on a CPU in blocks of nodes, each with the keys that one of them reads.

A dense mask would spend most of its work on pairs of siblings' branches that may not see each other.
Registered with transformers under the name `ATTENTION`; the plan travels with the forward call.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from learner.fused_attention import fused_attention
from learner.packing import BLOCK_NODES

ATTENTION = "agentflow_tree"


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
    (`fused_attention.interval_mask`) in one kernel, else block by block.

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
