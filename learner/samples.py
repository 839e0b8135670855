"""Trajectories to training samples: the engine's own tokens and log-probs, laid out on one axis."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from learner.types import GrammarSpan, TrainingSample
from rollout.types import Group, Trajectory, floats_of, ids_of

if TYPE_CHECKING:
    from torch import Tensor


def group_samples(
    group: Group, *, temperature: float, version_ages: Mapping[int, int] | None = None
) -> list[TrainingSample]:
    """Return one sample for each branch of the trajectories that train, with the advantages of their turns.

    Trajectories without a total reward give none. A trajectory whose advantages are all 0 gives a sample: it counts in
    the loss's denominators and in the KL term. So does one whose every token is too old, so that its masked tokens are
    counted; a batch leaves it out. One without a turn gives none.
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

    What a branch shares with another is trained in one of them and context in the other, so that every sampled
    token is trained once, after the very tokens that it was sampled after.

    `version_ages` tells the age of each version's weights in train steps (None: all are the learner's own). Tokens of
    a version that it lacks are too old and are taken out of the loss mask, one by one: what comes after them in the
    same turn, from newer weights, is trained. Raises ValueError for a trajectory that a server sampled: without its
    log-probs there is nothing to train on.
    """
    if trajectory.served:
        raise ValueError(f"trajectory {trajectory.id} has no log-probs to train on: a server answered it")
    samples = []
    turns = trajectory.planner_turns
    for branch, numbers in enumerate(trajectory.branches):
        token_ids = ids_of(turns[numbers[-1]].dialogue).astype(np.int64)
        sampled = np.zeros(len(token_ids), dtype=bool)
        ages = np.full(len(token_ids), -1, dtype=np.int64)
        logprobs = np.zeros(len(token_ids), dtype=np.float32)
        advantages = np.zeros(len(token_ids), dtype=np.float32)
        turn_ids = np.full(len(token_ids), -1, dtype=np.int64)
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
    """The log-probs of each sample's trained tokens, by its name, as float32 `[num_loss_tokens]`.

    `logprobs` is a tensor `[B, T]`, on any device.
    """
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
