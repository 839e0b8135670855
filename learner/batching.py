"""Samples to the batch of one optimizer step."""

from collections.abc import Sequence

from learner.packing import split_microbatches
from learner.types import TrainBatch, TrainingSample


def build_batch(samples: Sequence[TrainingSample], *, microbatch_tokens: int) -> TrainBatch:
    """Denominators are counted here, over the whole optimizer step, never per microbatch. Samples without a trained
    token are left out of them; what was masked for its age is counted all the same."""
    trained = [sample for sample in samples if sample.num_loss_tokens]
    versions = [sample.oldest_policy_version for sample in trained]
    return TrainBatch(
        microbatches=split_microbatches(trained, microbatch_tokens),
        num_loss_tokens=sum(sample.num_loss_tokens for sample in trained),
        num_trajectories=len(trained),
        num_masked_tokens=sum(sample.num_masked_tokens for sample in samples),
        oldest_policy_version=min((version for version in versions if version is not None), default=None),
    )
