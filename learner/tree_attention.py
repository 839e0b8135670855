"""Attention over a packed prefix tree, in blocks: a block of nodes reads its ancestors and nothing else.

A dense mask would spend most of its work on pairs of siblings' branches that may not see each other.
Registered with transformers under the name `ATTENTION`; the plan travels with the forward call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

ATTENTION = "agentflow_tree"
BLOCK_NODES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """Nodes `[start, end)` attend to the nodes `keys` `[K]` where `mask` `[end - start, K]` is True."""

    start: int
    end: int
    keys: Tensor
    mask: Tensor


def plan_attention(mask: np.ndarray, device: torch.device) -> tuple[AttentionBlock, ...]:
    """Cut an `[N, N]` ancestor mask into blocks of rows with the columns that they use."""
    blocks = []
    for start in range(0, len(mask), BLOCK_NODES):
        rows = mask[start : start + BLOCK_NODES]
        keys = np.nonzero(rows.any(axis=0))[0]
        blocks.append(
            AttentionBlock(
                start=start,
                end=start + len(rows),
                keys=torch.from_numpy(keys).to(device),
                mask=torch.from_numpy(rows[:, keys]).to(device),
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
    scaling: float | None = None,
    dropout: float = 0.0,
    tree_blocks: Sequence[AttentionBlock] = (),
    **_: Any,
) -> tuple[Tensor, None]:
    """query `[1, heads, N, d]`, key and value `[1, kv_heads, N, d]`; returns `[1, N, heads, d]`."""
    repeats = query.shape[1] // key.shape[1]
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            query[:, :, block.start : block.end],
            key.index_select(2, block.keys).repeat_interleave(repeats, dim=1),
            value.index_select(2, block.keys).repeat_interleave(repeats, dim=1),
            attn_mask=block.mask[None, None],
            dropout_p=dropout,
            scale=scaling,
        )
        for block in tree_blocks
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def register() -> str:
    """Make transformers know this attention; returns the name to load a model with."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, tree_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
    return ATTENTION
