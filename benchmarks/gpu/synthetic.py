"""Training samples of a wanted length, of random tokens: for what depends on sizes alone, as memory and speed do."""

import numpy as np

from learner.packing import build_batch
from learner.types import TrainBatch, TrainingSample


def samples(*, siblings: int, shared: int, own: int, vocab: int, seed: int = 0) -> list[TrainingSample]:
    """So many siblings with a prompt of `shared` tokens, each with `own` tokens of its own, which are trained."""
    random = np.random.default_rng(seed)
    prompt = random.integers(100, vocab, shared)
    return [
        _sample(np.concatenate([prompt, random.integers(100, vocab, own)]), trained_from=shared, name=f"{seed}/{index}")
        for index in range(siblings)
    ]


def longest(num_tokens: int, vocab: int) -> TrainBatch:
    """One trajectory of so many tokens, half of which are trained, as a train step of its own."""
    half = num_tokens // 2
    rows = samples(siblings=1, shared=num_tokens - half, own=half, vocab=vocab)
    return build_batch(rows, microbatch_tokens=num_tokens)


def _sample(token_ids: np.ndarray, *, trained_from: int, name: str) -> TrainingSample:
    mask = np.arange(len(token_ids)) >= trained_from
    return TrainingSample(
        trajectory_id=name,
        ages=np.where(mask, 0, -1),
        token_ids=token_ids.astype(np.int64),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        advantages=np.where(mask, np.float32(1), np.float32(0)),
        turn_ids=np.where(mask, 0, -1),
        grammar_spans=(),
        temperature=1.0,
    )
