"""Trajectories to training samples: the engine's own tokens and log-probs, laid out on one axis."""

from collections.abc import Sequence

import numpy as np

from learner.types import GrammarSpan, TrainingSample
from rollout.types import Trajectory, TrajectoryGroup, Turn


def build_samples(
    group: TrajectoryGroup, turn_advantages: Sequence[Sequence[float]], *, temperature: float
) -> list[TrainingSample]:
    """One sample per trajectory that has a non-zero advantage; all tokens of a turn share the turn's.

    `turn_advantages` holds one list per trajectory with one number per planner turn.
    """
    return [
        build_sample(trajectory, advantages, temperature=temperature)
        for trajectory, advantages in zip(group.trajectories, turn_advantages, strict=True)
        if any(advantages)
    ]


def build_sample(trajectory: Trajectory, turn_advantages: Sequence[float], *, temperature: float) -> TrainingSample:
    """Lay the planner's turns on one axis. Raises ValueError where a turn's prompt does not continue the
    tokens before it: training on that would train on a context nobody sampled in."""
    turns = trajectory.planner_turns
    last = turns[-1]
    token_ids = np.array(last.prompt_token_ids + last.completion.token_ids, dtype=np.int64)
    loss_mask = np.zeros(len(token_ids), dtype=bool)
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    advantages = np.zeros(len(token_ids), dtype=np.float32)
    turn_ids = np.full(len(token_ids), -1, dtype=np.int64)
    spans = []
    for index, (turn, advantage) in enumerate(zip(turns, turn_advantages, strict=True)):
        start, end = _turn_span(turn, token_ids, trajectory.id)
        turn_ids[start:end] = index
        if turn.trainable:
            loss_mask[start:end] = True
            advantages[start:end] = advantage
            logprobs[start:end] = turn.completion.logprobs
        if turn.grammar is not None:
            spans.append(GrammarSpan(start=start, end=end, grammar=turn.grammar))
    version = trajectory.oldest_policy_version
    assert version is not None
    return TrainingSample(
        trajectory_id=trajectory.id,
        policy_version=version,
        token_ids=token_ids,
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        advantages=advantages,
        turn_ids=turn_ids,
        grammar_spans=tuple(spans),
        temperature=temperature,
    )


def _turn_span(turn: Turn, token_ids: np.ndarray, trajectory_id: str) -> tuple[int, int]:
    start = len(turn.prompt_token_ids)
    end = start + len(turn.completion.token_ids)
    sequence = np.array(turn.prompt_token_ids + turn.completion.token_ids)
    if end > len(token_ids) or not np.array_equal(sequence, token_ids[:end]):
        raise ValueError(f"trajectory {trajectory_id}: a turn's prompt does not continue the turns before it")
    return start, end
