"""Attention in blocks, fused or in products of its own, is plain attention under the tree's mask."""

import numpy as np
import pytest
import torch
from tiny import random_tree, reads

from learner import tree_attention
from learner.packing import BLOCK_NODES

SCALE = 0.3
HEADS, KV_HEADS, WIDTH = 4, 2, 8


def inputs(num_nodes, dtype):
    torch.manual_seed(0)
    shapes = [(1, heads, num_nodes, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes], torch.randn(1, num_nodes, HEADS, WIDTH)


def plain(tensors, mask):
    """By the definition, in float64; keys and values are repeated for the heads that share them."""
    query, key, value = (tensor.double() for tensor in tensors)
    key, value = (tensor.repeat_interleave(HEADS // KV_HEADS, dim=1) for tensor in (key, value))
    scores = (SCALE * query @ key.transpose(2, 3)).masked_fill(~torch.from_numpy(mask), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def with_gradients(output, tensors, weights):
    return [output, *torch.autograd.grad((output * weights).sum(), tensors)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("attend", ["_attend_on_card", "_attend_on_cpu"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_blocks_give_what_plain_attention_gives_and_its_gradients(monkeypatch, attend, dtype, bound, recompute):
    monkeypatch.setattr(tree_attention, "_attend_on_cpu", getattr(tree_attention, attend))
    row = random_tree(2 * BLOCK_NODES + 40, leaving=0.1)
    mask = reads(row.ends())
    tensors, weights = inputs(len(mask), dtype)
    blocks = tree_attention.plan_attention(row.ends(), torch.device("cpu"))
    read, _ = tree_attention.tree_attention(
        torch.nn.Module(), *tensors, None, scaling=SCALE, tree_blocks=blocks, tree_recompute=recompute
    )
    assert read.dtype == dtype
    found = with_gradients(read, tensors, weights)
    for one, expected in zip(found, with_gradients(plain(tensors, mask), tensors, weights), strict=True):
        assert torch.allclose(one.double(), expected.double(), atol=bound, rtol=bound)


def test_scores_are_not_rounded_to_the_precision_of_the_products():
    """Two keys whose scores differ by less than bfloat16 can tell at their size: 64.125 and 64 would be one number."""
    query = torch.full((1, 1, 1, 2), 8.0, dtype=torch.bfloat16)
    key = torch.tensor([[8.0, 0.015625], [8.0, 0.0]], dtype=torch.bfloat16)[None, None]
    value = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16).expand(2, 2)[None, None]
    block = tree_attention.AttentionBlock(start=0, end=1, keys=torch.arange(2), mask=torch.zeros(1, 2))
    read = tree_attention._attend_on_cpu(query, key, value, [block], 1.0, False)
    assert read[0, 0, 0, 0].item() == pytest.approx(1 / (1 + np.exp(-0.125)), abs=0.004)
