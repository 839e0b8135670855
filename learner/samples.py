"""Trajectories to training samples: the engine's own tokens and log-probs, laid out on one axis."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from learner.types import GrammarSpan, TrainingSample
from rollout.types import Trajectory, TrajectoryGroup, Turn

if TYPE_CHECKING:
    from torch import Tensor


def build_samples(
    group: TrajectoryGroup,
    turn_advantages: Sequence[Sequence[float] | None],
    *,
    temperature: float,
    version_ages: Mapping[int, int] | None = None,
) -> list[TrainingSample]:
    """One sample for each branch of a trajectory that trains; all tokens of a turn share the turn's advantage.

    `turn_advantages` holds one list per trajectory with one number per planner turn, None for one that does not train.
    A trajectory whose advantages are all 0 gives a sample: it counts in the loss's denominators and in the KL term. So
    does one whose every token is too old, so that its masked tokens are counted; a batch leaves it out. One without a
    turn gives none.
    """
    return [
        sample
        for trajectory, advantages in zip(group.trajectories, turn_advantages, strict=True)
        if advantages
        for sample in samples_of(trajectory, advantages, temperature=temperature, version_ages=version_ages)
    ]


def samples_of(
    trajectory: Trajectory,
    turn_advantages: Sequence[float],
    *,
    temperature: float,
    version_ages: Mapping[int, int] | None = None,
) -> list[TrainingSample]:
    """One for each branch. What a branch shares with another is trained in one of them and context in the other, so
    that every sampled token is trained once, after the very tokens that it was sampled after.

    `version_ages` tells the age of each version's weights in train steps (None: all are the learner's own). Tokens of
    a version that it lacks are too old and are taken out of the loss mask, one by one: what comes after them in the
    same turn, from newer weights, is trained. Raises ValueError for a trajectory that a server sampled: without its
    log-probs there is nothing to train on.
    """
    if trajectory.served:
        raise ValueError(
            f"trajectory {trajectory.id} was answered by a server, without token ids and log-probs: it can never be "
            "trained on"
        )
    return [
        _sample(trajectory, branch, numbers, turn_advantages, temperature, version_ages)
        for branch, numbers in enumerate(trajectory.branches)
    ]


def _sample(
    trajectory: Trajectory,
    branch: int,
    numbers: Sequence[int],
    turn_advantages: Sequence[float],
    temperature: float,
    version_ages: Mapping[int, int] | None,
) -> TrainingSample:
    """Lay the turns of a branch on one axis."""
    turns = trajectory.planner_turns
    last = turns[numbers[-1]]
    token_ids = np.array(last.prompt_token_ids + last.completion.token_ids, dtype=np.int64)
    sampled = np.zeros(len(token_ids), dtype=bool)
    ages = np.full(len(token_ids), -1, dtype=np.int64)
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    advantages = np.zeros(len(token_ids), dtype=np.float32)
    turn_ids = np.full(len(token_ids), -1, dtype=np.int64)
    spans = []
    for number in numbers:
        turn = turns[number]
        start = len(turn.prompt_token_ids)
        end = start + len(turn.completion.token_ids)
        turn_ids[start:end] = number
        if turn.trainable:
            sampled[start:end] = True
            ages[start:end] = _ages_of(turn, version_ages)
            advantages[start:end] = turn_advantages[number]
            logprobs[start:end] = turn.completion.logprobs
        if turn.grammar is not None:
            spans.append(GrammarSpan(start=start, end=end, grammar=turn.grammar))
    trained = sampled & (ages >= 0)
    return TrainingSample(
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


def _ages_of(turn: Turn, version_ages: Mapping[int, int] | None) -> list[int]:
    """Of each token; -1 for those that are too old."""
    versions = turn.completion.token_versions
    return [0] * len(versions) if version_ages is None else [version_ages.get(version, -1) for version in versions]


def trained_logprobs(rows: Sequence[TrainingSample], logprobs: "Tensor") -> dict[str, np.ndarray]:
    """The log-probs of each sample's trained tokens, by its name, as float32 `[num_loss_tokens]`. `logprobs` is a
    tensor `[B, T]`, on any device."""
    values = logprobs.detach().float().cpu().numpy()
    return {row.name: line[: len(row.loss_mask)][row.loss_mask] for row, line in zip(rows, values, strict=True)}


def scoring_sample(token_ids: Sequence[int]) -> TrainingSample:
    """Plain text as a sample, every token but the first of which has a log-prob; nothing to train."""
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
