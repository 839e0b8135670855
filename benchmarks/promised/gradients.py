"""Gradients: what reaches the adapter is what the loss says, and every group that trains has one."""

import torch

from learner.logprobs import token_logprobs
from promised.promise import Measured, Promise

BANDS = ((0.5, 0.98), (0.98, 0.998), (0.998, 0.9999), (0.9999, 1.0))
"""Of the probability of the token that is trained."""
LARGEST_ERROR = 0.1
"""Relative. The logits are bf16: one of 22 is off by up to 0.0625, and 1 - p by as large a share of itself."""


def _confident_tokens(seed: int) -> Measured:
    """A random bf16 head, and contexts that each lean to a token of their own; the largest error of each band."""
    generator = torch.Generator().manual_seed(seed)
    head = (torch.randn(4096, 576, generator=generator) * 0.05).bfloat16()
    tokens = torch.randint(len(head), (512,), generator=generator)
    contexts = torch.arange(len(tokens))
    rows = head[tokens].float()
    pull = torch.linspace(5, 22, len(tokens))[:, None] * rows / rows.norm(dim=1, keepdim=True) ** 2
    hidden = (torch.randn(pull.shape, generator=generator) + pull).bfloat16().requires_grad_()
    token_logprobs(
        hidden, head, torch.ones(len(tokens)), lambda *_: None, contexts, tokens, chunk_contexts=64
    ).sum().backward()
    probabilities = (hidden.detach().double() @ head.double().T).softmax(1)
    true = head[tokens].double() - probabilities @ head.double()
    errors = (hidden.grad.double() - true).norm(dim=1) / true.norm(dim=1)
    chosen = probabilities[contexts, tokens]
    largest = [errors[(chosen >= low) & (chosen < high)].max().item() for low, high in BANDS]
    shown = ", ".join(
        f"p in [{low:g}, {high:g}): {error:.3f}" for (low, high), error in zip(BANDS, largest, strict=True)
    )
    return Measured(f"largest relative error, {shown}", holds=max(largest) < LARGEST_ERROR)


PROMISES = [
    Promise(
        name="confident-tokens",
        said="A token keeps its gradient in bf16 however confident the policy is of it.",
        where="docs/algorithms.md",
        measure=_confident_tokens,
    ),
]
