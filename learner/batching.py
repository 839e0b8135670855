"""Samples to the batch of one optimizer step, and a batch's microbatches to the ranks of a learner."""

from collections.abc import Sequence
from itertools import pairwise

from learner.packing import common_prefix, split_microbatches
from learner.types import TrainBatch, TrainingSample


def build_batch(samples: Sequence[TrainingSample], *, microbatch_tokens: int) -> TrainBatch:
    """Denominators are counted here, over the whole optimizer step, never per microbatch. Samples without a trained
    token are left out of them; what was masked for its age is counted all the same."""
    trained = [sample for sample in samples if sample.num_loss_tokens]
    return TrainBatch(
        microbatches=split_microbatches(trained, microbatch_tokens),
        num_loss_tokens=sum(sample.num_loss_tokens for sample in trained),
        num_trajectories=len(trained),
        num_masked_tokens=sum(sample.num_masked_tokens for sample in samples),
        max_age=max((sample.max_age for sample in trained), default=0),
    )


def share_out(
    microbatches: Sequence[Sequence[TrainingSample]], num_ranks: int
) -> tuple[tuple[Sequence[TrainingSample], ...], ...]:
    """The microbatches of each rank, largest first; the same on whichever rank it is computed.

    The next largest goes to the rank with the fewest distinct tokens so far. Ranks of the ZeRO stages that meet in
    every pass then meet over microbatches of about one size. With fewer microbatches than ranks some get none.
    """
    shares: list[list[Sequence[TrainingSample]]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for rows in sorted(microbatches, key=num_distinct_tokens, reverse=True):
        lightest = loads.index(min(loads))
        shares[lightest].append(rows)
        loads[lightest] += num_distinct_tokens(rows)
    return tuple(tuple(share) for share in shares)


def num_distinct_tokens(rows: Sequence[TrainingSample]) -> int:
    """Tokens of a microbatch as it is packed, shared prefixes once. Siblings stand side by side in it."""
    shared = sum(common_prefix(left, right) for left, right in pairwise(rows))
    return sum(len(row.token_ids) for row in rows) - shared
