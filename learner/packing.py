"""From samples to microbatches: split by length, packed into rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np

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


BLOCK_NODES = 128
"""Nodes of a row whose attention is computed together."""


class TokenSequence(Protocol):
    """Anything that is a token sequence of the forward pass: `token_ids` is `[T]`."""

    @property
    def token_ids(self) -> np.ndarray: ...


Sample = TypeVar("Sample", bound=TokenSequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """A prefix tree on one row of N nodes, in preorder: a node's descendants follow it without a gap.

    token_ids, positions: `[N]`. parents: `[N]`, -1 at a root. `node_of[i][t]` is the node of token t of
    sample i.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    parents: np.ndarray
    node_of: tuple[np.ndarray, ...]

    def ends(self) -> np.ndarray:
        """`[N]`: the node after the last descendant of each. Node k is q itself or an ancestor of it exactly if
        `k <= q < ends[k]`."""
        ends = list(range(1, len(self.parents) + 1))
        parents = self.parents.tolist()
        for node in range(len(parents) - 1, -1, -1):
            if (parent := parents[node]) >= 0:
                ends[parent] = max(ends[parent], ends[node])
        return np.array(ends, dtype=np.int64)


def pack(samples: Sequence[TokenSequence]) -> PackedRow:
    """Merge the samples' token sequences into one prefix tree. Whatever their order, nodes are those of sorted
    sequences, which come in preorder."""
    children: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    node_of = [np.empty(len(sample.token_ids), dtype=np.int64) for sample in samples]
    sequences = [sample.token_ids.tolist() for sample in samples]
    for index in sorted(range(len(samples)), key=sequences.__getitem__):
        parent = -1
        nodes = node_of[index]
        for position, token in enumerate(sequences[index]):
            node = children.get((parent, token))
            if node is None:
                node = children[(parent, token)] = len(tokens)
                tokens.append(token)
                positions.append(position)
                parents.append(parent)
            nodes[position] = parent = node
    return PackedRow(
        token_ids=np.array(tokens, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        parents=np.array(parents, dtype=np.int64),
        node_of=tuple(node_of),
    )


def split_microbatches(samples: Sequence[Sample], max_tokens: int) -> tuple[tuple[Sample, ...], ...]:
    """Cut samples into microbatches of at most `max_tokens` distinct tokens, siblings side by side.

    Sorting by token ids puts common prefixes next to each other. A sample longer than `max_tokens` gets a
    microbatch of its own.
    """
    return tuple(tuple(batch) for batch in _grow(sorted(samples, key=lambda s: s.token_ids.tolist()), max_tokens))


def _grow(samples: Sequence[Sample], max_tokens: int) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    size = 0
    for sample in samples:
        added = len(sample.token_ids) - (common_prefix(batch[-1], sample) if batch else 0)
        if batch and size + added > max_tokens:
            yield batch
            batch, size, added = [], 0, len(sample.token_ids)
        batch.append(sample)
        size += added
    if batch:
        yield batch


def common_prefix(left: TokenSequence, right: TokenSequence) -> int:
    length = min(len(left.token_ids), len(right.token_ids))
    differs = np.nonzero(left.token_ids[:length] != right.token_ids[:length])[0]
    return int(differs[0]) if len(differs) else length
