"""Training samples from trajectories, and their microbatches: split by length and packed into rows."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from learner.types import GrammarSpan, TrainBatch, TrainingSample
from rollout.types import Group, Trajectory, floats_of, ids_of

if TYPE_CHECKING:
    from torch import Tensor


def group_samples(
    group: Group, *, temperature: float, version_ages: Mapping[int, int] | None = None
) -> list[TrainingSample]:
    """Return one sample for each branch of the trajectories that train, with the advantages of their turns.

    A trajectory whose advantages are all 0 counts in the loss's denominators and the KL term. One whose every token is
    too old gives a sample, too, so that its masked tokens are counted.
    """
    return [
        sample
        for trajectory in group.trajectories
        if trajectory.total is not None and trajectory.planner_turns
        for sample in samples_of(
            trajectory,
            [turn.advantage or 0.0 for turn in trajectory.planner_turns],
            temperature=temperature,
            version_ages=version_ages,
        )
    ]


def samples_of(
    trajectory: Trajectory,
    turn_advantages: Sequence[float],
    *,
    temperature: float,
    version_ages: Mapping[int, int] | None = None,
) -> list[TrainingSample]:
    """Return a sample for each branch, with its turns on one axis.

    What a branch shares with another is trained in one of them and context in the other. `version_ages` is the age of
    each version's weights in train steps (None: all are the learner's own). Tokens of a version that it lacks are too
    old and leave the loss mask one by one. Raises ValueError for a trajectory of a server, which has no log-probs.
    """
    if trajectory.served:
        raise ValueError(f"trajectory {trajectory.id} has no log-probs to train on: a server answered it")
    samples = []
    turns = trajectory.planner_turns
    for branch, numbers in enumerate(trajectory.branches):
        token_ids = ids_of(turns[numbers[-1]].dialogue).astype(np.int64)
        sampled = np.zeros(len(token_ids), dtype=bool)
        ages, turn_ids = np.full((2, len(token_ids)), -1, dtype=np.int64)
        logprobs, advantages = np.zeros((2, len(token_ids)), dtype=np.float32)
        spans = []
        for number in numbers:
            turn = turns[number]
            start = len(turn.prompt) // 4
            end = start + turn.num_tokens
            turn_ids[start:end] = number
            if turn.trainable:
                sampled[start:end] = True
                ages[start:end] = [0 if version_ages is None else version_ages.get(v, -1) for v in turn.token_versions]
                advantages[start:end] = turn_advantages[number]
                logprobs[start:end] = floats_of(turn.logprobs)
            if turn.grammar is not None:
                spans.append(GrammarSpan(start=start, end=end, grammar=turn.grammar))
        trained = sampled & (ages >= 0)
        samples.append(
            TrainingSample(
                trajectory_id=trajectory.id,
                branch=branch,
                ages=ages,
                token_ids=token_ids,
                loss_mask=trained,
                rollout_logprobs=np.where(trained, logprobs, np.float32(0)),
                advantages=np.where(trained, advantages, np.float32(0)),
                turn_ids=turn_ids,
                grammar_spans=tuple(spans),
                temperature=temperature,
                num_masked_tokens=int(sampled.sum() - trained.sum()),
            )
        )
    return samples


def trained_logprobs(rows: Sequence[TrainingSample], logprobs: "Tensor") -> dict[str, np.ndarray]:
    """Return the float32 log-probs of each sample's trained tokens by its name, from a tensor `[B, T]`."""
    values = logprobs.detach().float().cpu().numpy()
    return {row.name: line[: len(row.loss_mask)][row.loss_mask] for row, line in zip(rows, values, strict=True)}


def scoring_sample(token_ids: Sequence[int]) -> TrainingSample:
    """Return plain text as a sample. Every token but the first has a log-prob, and none is trained."""
    count = len(token_ids)
    mask = np.ones(count, dtype=bool)
    mask[0] = False
    return TrainingSample(
        trajectory_id="",
        ages=np.full(count, -1, dtype=np.int64),
        token_ids=np.array(token_ids, dtype=np.int64),
        loss_mask=mask,
        rollout_logprobs=np.zeros(count, dtype=np.float32),
        advantages=np.zeros(count, dtype=np.float32),
        turn_ids=np.full(count, -1, dtype=np.int64),
        grammar_spans=(),
        temperature=1.0,
    )


def build_batch(samples: Sequence[TrainingSample], *, microbatch_tokens: int) -> TrainBatch:
    """Split samples into microbatches, and count the denominators over the whole optimizer step.

    Samples without a trained token are left out, except that their masked tokens count.
    """
    trained = [sample for sample in samples if sample.num_loss_tokens]
    branches = Counter(sample.trajectory_id for sample in trained)
    # The policy chooses how often it branches, which must not raise a trajectory's weight.
    trained = [replace(sample, weight=1 / branches[sample.trajectory_id]) for sample in trained]
    return TrainBatch(
        microbatches=split_microbatches(trained, microbatch_tokens),
        num_loss_tokens=sum(sample.num_loss_tokens for sample in trained),
        num_trajectories=len(branches),
        num_masked_tokens=sum(sample.num_masked_tokens for sample in samples),
        max_age=max((sample.max_age for sample in trained), default=0),
    )


def num_distinct_tokens(rows: Sequence[TrainingSample]) -> int:
    """Return the tokens of a packed microbatch, shared prefixes once. Siblings must be adjacent."""
    shared = sum(common_prefix(left, right) for left, right in pairwise(rows))
    return sum(len(row.token_ids) for row in rows) - shared


BLOCK_NODES = 128
"""Nodes of a row whose attention is computed at a time."""


@dataclass(frozen=True, slots=True)
class NumberedSequence:
    """A token sequence that is read, not trained, with its position in the caller's list."""

    index: int
    token_ids: np.ndarray
    """`[T]` int64."""


TokenSequence = TrainingSample | NumberedSequence
Sample = TypeVar("Sample", bound=TokenSequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """A prefix tree on one row of N nodes, in preorder. All arrays but those of `node_of` are `[N]`."""

    token_ids: np.ndarray
    positions: np.ndarray
    parents: np.ndarray
    """-1 at a root."""
    node_of: tuple[np.ndarray, ...]
    """`node_of[i][t]` is the node of token t of sample i."""

    def ends(self) -> np.ndarray:
        """Return `[N]`, the node after the last descendant of each node.

        Node k is q itself or an ancestor of q exactly if `k <= q < ends[k]`.
        """
        ends = list(range(1, len(self.parents) + 1))
        parents = self.parents.tolist()
        for node in range(len(parents) - 1, -1, -1):
            if (parent := parents[node]) >= 0:
                ends[parent] = max(ends[parent], ends[node])
        return np.array(ends, dtype=np.int64)


def pack(samples: Sequence[TokenSequence]) -> PackedRow:
    """Merge token sequences into one prefix tree. Its nodes do not depend on the order of the samples."""
    children: dict[tuple[int, int], int] = {}
    nodes: list[tuple[int, int, int]] = []
    node_of = [np.empty(len(sample.token_ids), dtype=np.int64) for sample in samples]
    sequences = [sample.token_ids.tolist() for sample in samples]
    for index in sorted(range(len(samples)), key=sequences.__getitem__):
        parent = -1
        for position, token in enumerate(sequences[index]):
            node = children.setdefault((parent, token), len(nodes))
            if node == len(nodes):
                nodes.append((token, position, parent))
            node_of[index][position] = parent = node
    token_ids, positions, parents = np.array(nodes, dtype=np.int64).reshape(-1, 3).T.copy()
    return PackedRow(token_ids=token_ids, positions=positions, parents=parents, node_of=tuple(node_of))


def split_microbatches(samples: Sequence[Sample], max_tokens: int) -> tuple[tuple[Sample, ...], ...]:
    """Cut samples into microbatches of at most `max_tokens` distinct tokens, or of one longer sample.

    Sorting by token ids makes siblings adjacent.
    """
    batches: list[list[Sample]] = []
    size = 0
    for sample in sorted(samples, key=lambda sample: sample.token_ids.tolist()):
        added = len(sample.token_ids) - (common_prefix(batches[-1][-1], sample) if batches else 0)
        if not batches or size + added > max_tokens:
            batches.append([])
            size, added = 0, len(sample.token_ids)
        batches[-1].append(sample)
        size += added
    return tuple(tuple(batch) for batch in batches)


def common_prefix(left: TokenSequence, right: TokenSequence) -> int:
    length = min(len(left.token_ids), len(right.token_ids))
    differs = np.nonzero(left.token_ids[:length] != right.token_ids[:length])[0]
    return int(differs[0]) if len(differs) else length
