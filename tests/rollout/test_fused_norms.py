"""On a CPU an engine computes norms with the kernels that vLLM has for them: they give what plain operations give."""

import pytest
import torch

from rollout.engines.vllm_parts import FUSED, fused_norms

pytestmark = pytest.mark.slow

EPSILON = 1e-5
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
"""Of a value near one: the kernel rounds once to bfloat16, the operations twice."""


@pytest.fixture(scope="module")
def ops():
    from vllm import ir

    for _ in range(2):
        assert fused_norms() == {"rms_norm": [FUSED, "native"], "fused_add_rms_norm": [FUSED, "native"]}
    return ir.ops


def rows(dtype, *, width=576, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(7, width, generator=generator).to(dtype)


def weight_of(dtype, width=576):
    return (1 + 0.1 * torch.randn(width, generator=torch.Generator().manual_seed(9))).to(dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_kernel_of_a_norm_gives_what_the_plain_operations_give(ops, dtype):
    x, weight = rows(dtype), weight_of(dtype)
    plain, fused = (ops.rms_norm.impls[name].impl_fn(x, weight, EPSILON) for name in ("native", FUSED))
    torch.testing.assert_close(fused, plain, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", ROUNDING)
def test_kernel_of_a_sums_norm_gives_the_same_sum_and_what_the_plain_operations_give(ops, dtype):
    x, residual, weight = rows(dtype), rows(dtype, seed=1), weight_of(dtype)
    (plain, summed), (fused, summed_too) = (
        ops.fused_add_rms_norm.impls[name].impl_fn(x.clone(), residual.clone(), weight, EPSILON)
        for name in ("native", FUSED)
    )
    assert torch.equal(summed, summed_too)
    torch.testing.assert_close(fused, plain, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


def test_what_the_kernels_cannot_do_is_left_to_the_plain_operations(ops):
    x, weight = rows(torch.float32), weight_of(torch.float32)
    fits, fits_sum = ops.rms_norm.impls[FUSED].supports_args, ops.fused_add_rms_norm.impls[FUSED].supports_args
    assert fits(x, weight, EPSILON)
    assert fits_sum(x, x, weight, EPSILON)
    strided = rows(torch.float32, width=2 * 576)[:, :576]
    odd = rows(torch.float32, width=577)
    others = [(strided, weight), (odd, weight_of(torch.float32, 577)), (x, None), (x, weight.bfloat16())]
    for other, with_weight in others:
        assert not fits(other, with_weight, EPSILON)
        assert not fits_sum(other, other, with_weight, EPSILON)
    assert not fits_sum(x, strided, weight, EPSILON)
    assert not fits(x, weight, EPSILON, 288)
