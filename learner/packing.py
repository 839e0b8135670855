"""Packing: the samples of one forward pass as a prefix tree, so that shared tokens are computed once.

Siblings share their prompt, and often their first turns. The tree's nodes lie on one row; a node attends to
its ancestors only and sits at its depth as position, which is exactly what it would see alone in its sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

BLOCK_NODES = 128
"""Nodes of a row whose attention is computed together."""


class TokenSequence(Protocol):
    """Anything that is a token sequence of the forward pass: `token_ids` is `[T]`."""

    @property
    def token_ids(self) -> np.ndarray: ...


Sample = TypeVar("Sample", bound=TokenSequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """A prefix tree on one row of N nodes, parents before children.

    token_ids, positions: `[N]`. parents: `[N]`, -1 at a root. `node_of[i][t]` is the node of token t of
    sample i.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    parents: np.ndarray
    node_of: tuple[np.ndarray, ...]

    def attention_mask(self) -> np.ndarray:
        """`[N, N]` bool: row i is True at i and its ancestors."""
        mask = np.eye(len(self.token_ids), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask


def pack(samples: Sequence[TokenSequence]) -> PackedRow:
    """Merge the samples' token sequences into one prefix tree."""
    children: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    node_of = []
    for sample in samples:
        parent = -1
        nodes = np.empty(len(sample.token_ids), dtype=np.int64)
        for position, token in enumerate(sample.token_ids.tolist()):
            node = children.get((parent, token))
            if node is None:
                node = children[(parent, token)] = len(tokens)
                tokens.append(token)
                positions.append(position)
                parents.append(parent)
            nodes[position] = parent = node
        node_of.append(nodes)
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
