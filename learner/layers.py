"""Norms and adapted linear layers of a decoder in fewer passes over memory than transformers and PEFT make."""

from functools import partial
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm


def fuse(model: nn.Module) -> None:
    """Replace the forward passes of a PEFT model's norms and adapted linear layers, whose own weights are frozen.

    Products are in the type of the input, to which the adapter is rounded. Its gradients are in its own type.
    """
    for module in model.modules():
        if isinstance(module, Linear):
            module.forward = partial(_adapted, module)  # type: ignore[method-assign]
        elif type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_normed, module)


def _adapted(module: Linear, x: Tensor) -> Tensor:
    base, (name,) = module.base_layer, module.active_adapters
    a, b = module.lora_A[name].weight, module.lora_B[name].weight
    result: Tensor = _AdaptedLinear.apply(x, base.weight, base.bias, a, b, module.scaling[name])
    return result


def _normed(module: Any, x: Tensor) -> Tensor:
    if x.is_cuda:
        return rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)
    # torch computes it in many operations on a CPU.
    result: Tensor = _RmsNorm.apply(x, module.weight, module.variance_epsilon)
    return result


class _AdaptedLinear(torch.autograd.Function):
    """x W^T + bias + scale x A^T B^T, with A `[r, in]` and B `[out, r]` (LoRA, arXiv 2106.09685, eq. 3)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        rows, rounded_a = x.reshape(-1, x.shape[-1]), a.to(x.dtype)
        scaled_b = torch.mul(b, scale, out=torch.empty_like(b, dtype=x.dtype))
        inner = rows @ rounded_a.T
        result = linear(rows, weight, bias).addmm_(inner, scaled_b.T)
        ctx.save_for_backward(rows, weight, rounded_a, scaled_b, inner)
        ctx.scale, ctx.dtype = scale, a.dtype
        return result.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, a, scaled_b, inner = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(scaled_b))
        by_inner = grad @ scaled_b
        by_a = (by_inner.T @ rows).to(ctx.dtype)
        by_b = torch.mul(grad.T @ inner, ctx.scale, out=torch.empty_like(scaled_b, dtype=ctx.dtype))
        by_x = None
        if ctx.needs_input_grad[0]:
            by_x = (grad @ weight).addmm_(by_inner, a).view(*grads[0].shape[:-1], -1)
        return by_x, None, None, by_a, by_b, None


class _RmsNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467, eq. 4). The mean is in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = torch.mul(x, scale, out=torch.empty_like(x))
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        unit, scale, weight = ctx.saved_tensors
        by_unit = grads[0] * weight
        along = (by_unit * unit).mean(dim=-1, keepdim=True, dtype=torch.float32)
        return by_unit.addcmul_(unit, along.to(unit.dtype), value=-1).mul_(scale), None, None
