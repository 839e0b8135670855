import pytest
import torch

from learner.policy import TokenLogprobs

VOCABULARY, HIDDEN, CONTEXTS = 4096, 576, 64
BANDS = ((0.0, 0.5), (0.5, 0.98), (0.98, 0.998), (0.998, 0.9999), (0.9999, 1.0))


def confident_head(*, pull, seed=0):
    """A random bf16 head, and contexts each of which leans to a token of its own, the more the larger `pull`."""
    generator = torch.Generator().manual_seed(seed)
    head = (torch.randn(VOCABULARY, HIDDEN, generator=generator) * 0.05).bfloat16()
    favourites = torch.randperm(VOCABULARY, generator=generator)[:CONTEXTS]
    rows = head[favourites].float()
    lean = pull[:, None] * rows / rows.norm(dim=1, keepdim=True) ** 2
    hidden = (torch.randn(CONTEXTS, HIDDEN, generator=generator) + lean).bfloat16()
    return head, hidden.requires_grad_(), favourites


def gradients(head, hidden, tokens):
    """Of each context's token: the head's, and that of float64."""
    contexts = torch.arange(len(hidden))
    TokenLogprobs.apply(hidden, head, torch.ones(len(hidden)), lambda *_: None, contexts, tokens, 16).sum().backward()
    probabilities = (hidden.detach().double() @ head.double().T).softmax(1)
    return hidden.grad.double(), head[tokens].double() - probabilities @ head.double(), probabilities[contexts, tokens]


@pytest.mark.parametrize(("low", "high"), BANDS)
def test_bf16_head_keeps_the_gradient_of_a_token_however_confident_it_is(low, high):
    """What is left is the rounding of the logits themselves: 22 in bf16 is off by up to 0.0625, its exp by as much."""
    head, hidden, tokens = confident_head(pull=torch.linspace(0, 22, CONTEXTS))
    found, true, probabilities = gradients(head, hidden, tokens)
    within = (probabilities >= low) & (probabilities < high)
    assert within.sum() >= 3
    error = (found - true)[within].norm(dim=1) / true[within].norm(dim=1)
    assert error.max() < 0.1


def test_in_full_precision_the_gradient_is_the_one_of_a_plain_log_softmax():
    """Several tokens of one context, temperatures, and a chunk that ends in the middle."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(50, 8, generator=generator, dtype=torch.float64)
    hidden = torch.randn(5, 8, generator=generator, dtype=torch.float64).requires_grad_()
    temperatures = torch.tensor([1.0, 0.7, 2.0, 1.0, 0.5])
    contexts, tokens = torch.tensor([0, 0, 1, 2, 4, 4, 4]), torch.tensor([3, 7, 7, 49, 0, 1, 2])
    advantages = torch.linspace(-1, 1, 7)
    found = TokenLogprobs.apply(hidden, head, temperatures, lambda *_: None, contexts, tokens, 2)
    (gradient,) = torch.autograd.grad((advantages * found).sum(), hidden)
    plain = (hidden @ head.T / temperatures[:, None]).log_softmax(1)[contexts, tokens]
    (expected,) = torch.autograd.grad((advantages * plain).sum(), hidden)
    assert torch.allclose(found.double(), plain, atol=1e-5)
    assert torch.allclose(gradient, expected, atol=1e-5)
