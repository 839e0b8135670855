"""One kernel with one integer per node reads the same as the mask of ancestors."""

import numpy as np
import pytest
import torch
from tiny import gradient_of, make_learner, make_samples, random_tree, reads, save_tiny_model
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import flex_attention_hop

from configs.learner import LearnerConfig
from learner import tree_attention
from learner.packing import build_batch
from learner.tree_attention import attend_by_block

CPU = torch.device("cpu")


def uncompiled(query, key, value, *, block_mask, scale, enable_gqa):
    """The kernel's own definition in torch, which has gradients on a CPU as well."""
    score = lambda score, batch, head, query, key: score  # noqa: E731
    return flex_attention_hop(query, key, value, score, block_mask.as_tuple(), scale, {})[0]


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(tree_attention, "kernel", lambda: uncompiled)


def table_of(mask):
    """`[N / 128, N / 128]`: 0 where a block is left out, 1 where the comparison is asked, 2 where all of it is read."""
    size = mask.kv_num_blocks.shape[-1]
    table = np.zeros((size, size), dtype=int)
    for kind, counts, listed in (
        (1, mask.kv_num_blocks, mask.kv_indices),
        (2, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for block in range(size):
            table[block, listed[0, 0, block, : counts[0, 0, block]].numpy()] += kind
    return table


@pytest.mark.parametrize("seed", range(20))
def test_blocks_that_are_left_out_hold_nothing_and_those_not_asked_about_everything(seed):
    ends = tree_attention.padded_ends(random_tree(700, seed=seed).ends())
    assert len(ends) == 768
    table = table_of(tree_attention.interval_mask(ends, CPU))
    blocks = reads(ends).reshape(6, 128, 6, 128).transpose(0, 2, 1, 3).reshape(6, 6, -1)
    assert not blocks[table == 0].any()
    assert blocks[table == 2].all()
    assert (table[np.triu_indices(6, 1)] == 0).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_the_kernel_gives_what_blocks_give_and_their_gradients(on_cpu, seed, dtype, bound):
    ends = tree_attention.padded_ends(random_tree(300, seed=seed).ends())
    torch.manual_seed(seed)
    inputs = [torch.randn(1, heads, len(ends), 8).to(dtype) for heads in (4, 2, 2)]
    mask = tree_attention.interval_mask(ends, CPU)
    found = tree_attention._with_gradients(lambda *qkv: tree_attention.fused_attention(*qkv, mask, 0.3), inputs)
    expected = tree_attention._with_gradients(lambda *qkv: attend_by_block(*qkv, ends, 0.3), inputs)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert torch.allclose(one.float(), other.float(), atol=bound * float(other.abs().max()), rtol=bound)


@pytest.mark.parametrize(("heads", "compilations"), [(6, 1), (4, 2)])
def test_rows_of_every_length_need_one_compilation_or_two(monkeypatch, heads, compilations):
    """Those that fit into one block as well. torch gives up after eight, and a run would end. Two where the first row
    has as many blocks as there are heads, which torch takes for the same number: 4 of 500 nodes."""
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(flex_attention.flex_attention, dynamic=True, fullgraph=True, backend=counter)
    monkeypatch.setattr(tree_attention, "kernel", lambda: compiled)
    # torch refuses gradients on a CPU before it compiles anything.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    for num_nodes in (500, 60, 1000, 128, 129):
        ends = tree_attention.padded_ends(random_tree(num_nodes, seed=0).ends())
        inputs = [torch.randn(1, count, len(ends), 16).requires_grad_() for count in (heads, heads // 2, heads // 2)]
        tree_attention.fused_attention(*inputs, tree_attention.interval_mask(ends, CPU), 0.25)
    assert counter.frame_count == compilations


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen3")


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_with_the_kernel_is_the_step_with_blocks(on_cpu, model_path, recompute):
    gradients = []
    for attention in ("blocks", "fused"):
        learner = make_learner(model_path, gradient_checkpointing=recompute)
        learner.policy.attention = attention
        gradients.append(gradient_of(learner, build_batch(make_samples(), microbatch_tokens=1000)))
    assert (gradients[0] - gradients[1]).abs().max() < 1e-5
    assert gradients[0].abs().max() > 1e-3


def test_a_cpu_reads_in_blocks_and_is_refused_the_kernel(model_path):
    assert make_learner(model_path).policy.attention == "blocks"
    with pytest.raises(ValueError, match="attention = 'fused' needs device = 'cuda'"):
        LearnerConfig(attention="fused")


@pytest.mark.parametrize("kernel", ["raises", "wrong", "right"])
def test_a_card_whose_compiler_fails_or_errs_reads_in_blocks_and_says_so(monkeypatch, caplog, kernel):
    def broken(*inputs, **options):
        if kernel == "raises":
            raise RuntimeError("out of resource: shared memory\nRequired: 180224")
        return uncompiled(*inputs, **options) * (1.5 if kernel == "wrong" else 1)

    monkeypatch.setattr(tree_attention, "kernel", lambda: broken)
    works = tree_attention.works(4, 2, 8, CPU)
    assert works == (kernel == "right")
    said = {"raises": "RuntimeError: out of resource: shared memory", "wrong": "its error is", "right": ""}
    assert said[kernel] in caplog.text
    assert bool(caplog.text) == (not works)
