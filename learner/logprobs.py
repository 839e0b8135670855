"""Log-probs of chosen tokens from hidden states, without ever holding a full logits matrix."""

from collections.abc import Callable

import torch
from torch import Tensor

Constrain = Callable[[Tensor, int, int], None]
"""`constrain(logits, start, end)`: set to -inf, in place, the logits `[end - start, V]` of tokens that the
sampler's grammar did not allow after contexts start to end."""


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    temperatures: Tensor,
    constrain: Constrain,
    context_of: Tensor,
    tokens: Tensor,
    *,
    chunk_contexts: int,
) -> Tensor:
    """Float32 log-softmax of `hidden @ head_weight.T / temperature` over the tokens left by `constrain`, at `tokens`.

    hidden `[C, H]`, head_weight `[V, H]` (frozen), temperatures `[C]`, context_of and tokens `[N]`: returns
    `[N]`, the log-prob of tokens[n] after context context_of[n]. Differentiable in `hidden`. The logits of
    `chunk_contexts` contexts exist at a time, `[chunk_contexts, V]`; the result does not depend on it.
    """
    return _TokenLogprobs.apply(hidden, head_weight, temperatures, constrain, context_of, tokens, chunk_contexts)


class _TokenLogprobs(torch.autograd.Function):
    """For logits z = h W^T / T, d logp(token) / d h = (W[token] - softmax(z) W) / T. The second term depends on the
    incoming gradient only through a factor per context, so it is computed in the forward pass, chunk by chunk, and no
    `[C, V]` tensor outlives its chunk.

    Both terms are taken relative to W[top], the row of the context's most likely token: where that token is nearly
    certain they are nearly equal, and a bf16 product would round away their difference, which is the whole gradient.
    softmax(z) W - W[top] is the sum over all other tokens of p (W[v] - W[top]), which is small by itself."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        head_weight: Tensor,
        temperatures: Tensor,
        constrain: Constrain,
        context_of: Tensor,
        tokens: Tensor,
        chunk_contexts: int,
    ) -> Tensor:
        result = torch.empty(len(tokens), device=hidden.device)
        expected = torch.empty(hidden.shape, device=hidden.device)
        top = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
        for start in range(0, len(hidden), chunk_contexts):
            end = min(start + chunk_contexts, len(hidden))
            logits = (hidden[start:end].to(head_weight.dtype) @ head_weight.T).float()
            logits.div_(temperatures[start:end, None])
            constrain(logits, start, end)
            here = ((context_of >= start) & (context_of < end)).nonzero().squeeze(-1)
            chosen = logits[context_of[here] - start, tokens[here]]
            normalizer = torch.logsumexp(logits, dim=-1)
            result[here] = chosen - normalizer[context_of[here] - start]
            if ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
                probabilities = logits.sub_(normalizer[:, None]).exp_()
                top[start:end] = probabilities.argmax(dim=-1)
                others = probabilities.scatter_(1, top[start:end, None], 0.0)
                expected[start:end] = (others.to(head_weight.dtype) @ head_weight).float()
                expected[start:end] -= others.sum(dim=-1, keepdim=True) * head_weight[top[start:end]].float()
        ctx.save_for_backward(expected, top, head_weight, temperatures, context_of, tokens)
        ctx.hidden_dtype = hidden.dtype  # type: ignore[attr-defined]
        return result

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        expected, top, head_weight, temperatures, context_of, tokens = ctx.saved_tensors  # type: ignore[attr-defined]
        mass = torch.zeros(len(expected), device=expected.device).index_add_(0, context_of, grad)
        result = expected.mul(-mass[:, None])
        apart = head_weight[tokens].float() - head_weight[top[context_of]].float()
        result.index_add_(0, context_of, apart * grad[:, None])
        result.div_(temperatures[:, None])
        return result.to(ctx.hidden_dtype), None, None, None, None, None, None  # type: ignore[attr-defined]
