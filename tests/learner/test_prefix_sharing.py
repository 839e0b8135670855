"""A shared prefix is computed once: the same gradient as if every sibling were computed alone, from fewer tokens."""

import numpy as np
import pytest
from tiny import LOSSES, gradient_of, make_learner, sample, save_tiny_model

from benchmarks.learner_efficiency import separate_batch, without_sharing
from learner.packing import build_batch
from learner.types import GrammarSpan
from tests.changed import replace

GRAMMAR = 'root ::= "{" ("w1" | "w2")* "}"'
OPEN, CLOSE, W1, W2 = 2, 3, 5, 6
PROMPT = (*range(10, 40), 7)
BRIDGE = (8, 9, 41)
DECISIONS = (
    ((W1, W2), (W1,)),
    ((W1, W2), (W2, W2, W1)),
    ((W1, W2), (W2, W2, W1), (W1,)),
    ((W1, W1), (W2,)),
    ((W2,),),
    ((W2,), (W1, W2)),
    ((), (W1,), (W2,)),
    ((W1, W2), (W1,)),
)
"""Of G = 8 siblings, turn by turn: they part at different turns, one repeats another."""


def sibling(index, decisions):
    ids, trained, spans = list(PROMPT), [], []
    for number, decision in enumerate(decisions):
        ids += BRIDGE if number else ()
        end = len(ids) + len(decision) + 2
        trained += range(len(ids), end)
        spans.append(GrammarSpan(start=len(ids), end=end, grammar=GRAMMAR))
        ids += [OPEN, *decision, CLOSE]
    advantage = (1.3, -0.7)[len(decisions) % 2]
    return replace(
        sample(ids, trained, advantage=advantage, name=str(index), temperature=0.7), grammar_spans=tuple(spans)
    )


@pytest.fixture(scope="module")
def group():
    return [sibling(index, decisions) for index, decisions in enumerate(DECISIONS)]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model_path(request, tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


def near(learner, samples):
    """As if a sampler close to the learner had sampled them: no token is clipped, all have a gradient."""
    own = [learner.policy.logprobs([one]).detach()[0].numpy() for one in samples]
    offsets = [np.linspace(-0.1, 0.1, len(logprobs), dtype=np.float32) for logprobs in own]
    return [
        replace(one, rollout_logprobs=np.where(one.loss_mask, logprobs + offset, np.float32(0)))
        for one, logprobs, offset in zip(samples, own, offsets, strict=True)
    ]


@pytest.mark.parametrize("objective", LOSSES)
def test_siblings_that_share_their_prefixes_have_the_gradient_of_siblings_apart(model_path, group, objective):
    learner = make_learner(model_path, loss=LOSSES[objective])
    samples = near(learner, group)
    shared = gradient_of(learner, build_batch(samples, microbatch_tokens=128))
    with without_sharing():
        apart = gradient_of(learner, separate_batch(samples, microbatch_tokens=128))
    assert (shared - apart).abs().max() < 1e-5
    assert apart.abs().max() > 5e-4
