"""Gradient checkpointing and chunked logits change what is kept in memory, and no number."""

import numpy as np
import pytest
import torch
from live_memory import LiveMemory
from tiny import gradient_of, make_learner, sample, save_tiny_model

from learner import policy
from learner.packing import build_batch

LONG = 300


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model_path(request, tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


def siblings(length):
    """Three that share half of their tokens, longer together than a block of the attention."""
    rng = np.random.default_rng(0)
    shared = rng.integers(4, 60, length // 2).tolist()
    made = []
    for index in range(3):
        ids = shared + rng.integers(4, 60, length // 2).tolist()
        made.append(sample(ids, range(length // 2, len(ids)), advantage=(1.0, -0.5, 0.3)[index], name=str(index)))
    return made


BATCH = build_batch(siblings(LONG), microbatch_tokens=10_000)


def test_checkpointing_changes_no_gradient(model_path):
    kept = gradient_of(make_learner(model_path), BATCH)
    computed_again = gradient_of(make_learner(model_path, gradient_checkpointing=True), BATCH)
    assert kept.abs().max() > 0
    assert torch.allclose(computed_again, kept, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("chunk", [16, 64])
def test_only_a_chunk_of_the_logits_exists_at_a_time(tmp_path, monkeypatch, chunk):
    """All 450 positions' would be 36 MB; a chunk's are 1.3 or 5.1 MB, held up to four times over by the softmax."""
    folder = save_tiny_model(tmp_path, "llama", vocab_size=20_000)
    monkeypatch.setattr(policy, "LOGIT_CHUNK_TOKENS", chunk)
    learner = make_learner(folder, gradient_checkpointing=True)
    with LiveMemory() as memory:
        gradient_of(learner, BATCH)
    logits_of_a_chunk = chunk * 20_000 * 4
    assert logits_of_a_chunk < memory.peak < 4 * logits_of_a_chunk + 8_000_000
