"""Samples to the batch of one optimizer step."""

from collections.abc import Sequence

from learner.packing import split_microbatches
from learner.types import TrainBatch, TrainingSample


def build_batch(samples: Sequence[TrainingSample], *, microbatch_tokens: int) -> TrainBatch:
    """Denominators are counted here, over the whole optimizer step, never per microbatch."""
    return TrainBatch(
        microbatches=split_microbatches(samples, microbatch_tokens),
        num_loss_tokens=sum(sample.num_loss_tokens for sample in samples),
        num_trajectories=len(samples),
        oldest_policy_version=min(sample.policy_version for sample in samples),
    )
