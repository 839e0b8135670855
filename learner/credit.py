"""Credit: group-relative advantages of trajectories and their steps, and the parts that explain them."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from statistics import fmean, stdev

import numpy as np

from configs.reward import Credit as Scheme
from learner.types import sample_name
from rollout.types import Group, GroupCredit, Spread, Trajectory, Turn, packed_floats

EPS = 1e-6
MIN_STD = 1e-3
"""A group below this standard deviation has no signal: its residue would be rounding noise blown up to full size."""
VALID_FLOOR = 0.05
GAIN_FLOOR, GAIN_CLIP = 0.15, 2.0
"""Least scale of a group's gains, and their bound in scales."""


def group_normalized(rewards: Sequence[float | None]) -> list[float]:
    """Return the advantage of each trajectory: (reward - group mean) / (sample std of the group + EPS).

    GRPO (arXiv 2402.03300, section 4.1.2), DAPO (arXiv 2503.14476, eq. 9), Flow-GRPO (arXiv 2510.05592,
    eq. 7). `rewards` holds one number per trajectory of one group; None is a trajectory that could not be
    scored: it enters no statistic and gets advantage 0. A group with fewer than two scored trajectories, or
    whose std is below `MIN_STD`, gets zeros. Raises ValueError for a reward that is not finite.
    """
    centered = group_centered(rewards)
    scored = [one for one, reward in zip(centered, rewards, strict=True) if reward is not None]
    if not any(scored):
        return centered
    std = math.sqrt(math.fsum(one**2 for one in scored) / (len(scored) - 1))
    return [one / (std + EPS) for one in centered]


def group_centered(rewards: Sequence[float | None]) -> list[float]:
    """Return the advantage of each trajectory: reward - group mean, not divided by the deviation.

    Dr. GRPO (arXiv 2503.20783, section 3.2): divided, a question that is almost always or almost never solved weighs
    more than one that is solved half of the time. `rewards`, the groups that get zeros, and errors are those of
    `group_normalized`.
    """
    scored = [float(reward) for reward in rewards if reward is not None]
    if not all(math.isfinite(reward) for reward in scored):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if len(scored) < 2 or stdev(scored) < MIN_STD:
        return [0.0] * len(rewards)
    mean = fmean(scored)
    return [0.0 if reward is None else reward - mean for reward in rewards]


def scaled(gains: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the gains of a group's steps, one list per trajectory, in units of their scale and clipped to `GAIN_CLIP`.

    The scale is the root mean square of the gains that are not 0, at least `GAIN_FLOOR`.
    """
    squares = [gain**2 for steps in gains for gain in steps if gain]
    scale = max(math.sqrt(math.fsum(squares) / len(squares)), GAIN_FLOOR) if squares else GAIN_FLOOR
    return [[min(max(gain / scale, -GAIN_CLIP), GAIN_CLIP) for gain in steps] for steps in gains]


def state_means(
    states: Sequence[Sequence[Hashable]], scores: Sequence[Sequence[float | None]]
) -> list[list[float | None]]:
    """Return the mean score of the steps of a group that were decided in the state of each step; None without a score.

    Takes and returns one list per trajectory. Scores are never compared over states: what is pooled over a group
    rewards positions that score high (a search above every answer), not decisions.
    """
    made: dict[Hashable, list[float]] = defaultdict(list)
    for states_of, scores_of in zip(states, scores, strict=True):
        for state, score in zip(states_of, scores_of, strict=True):
            if score is not None:
                made[state].append(score)
    return [
        [
            None if score is None else math.fsum(made[state]) / len(made[state])
            for state, score in zip(*pair, strict=True)
        ]
        for pair in zip(states, scores, strict=True)
    ]


def outcome_gated(
    outcomes: Sequence[float | None],
    states: Sequence[Sequence[Hashable]],
    scores: Sequence[Sequence[float | None]],
    *,
    weight: float,
) -> list[list[float]]:
    """Return the advantage of each step: z(outcome) + weight * D(score - mean score in the step's state).

    z is `group_normalized` over the trajectories, D is `scaled`. `outcomes` holds one number per trajectory, `states`
    and `scores` one list per trajectory; returns their shape. The outcome is the gate: a group without a difference in
    outcomes gets zeros. A step without a score, or with the scores of its siblings in the same state, keeps the
    outcome's part only, and with `weight` 0 the result is the outcome broadcast exactly. A trajectory without an
    outcome has no scores, and gets zeros.
    """
    parts = group_normalized(outcomes)
    if not any(parts):
        return [[0.0] * len(steps) for steps in scores]
    means = state_means(states, scores)
    gains = scaled(
        [
            # Rounded, for the mean of equal scores depends on how many there are.
            [
                0.0 if score is None or mean is None else round(score - mean, 12)
                for score, mean in zip(*pair, strict=True)
            ]
            for pair in zip(scores, means, strict=True)
        ]
    )
    return [
        [part + weight * gain if weight else part for gain in steps] for part, steps in zip(parts, gains, strict=True)
    ]


def share_in_order(group: Group) -> float | None:
    """Return how often step scores order two decisions in one state as their attempts ended; 0.5 is chance.

    The pairs are of attempts that decided differently after the same prompt, token for token, and have different
    outcomes; equal scores count half. None without a pair.
    """
    made: dict[bytes, list[tuple[Hashable, float, float]]] = defaultdict(list)
    for trajectory in group.trajectories:
        for turn in trajectory.planner_turns:
            if turn.score is not None and trajectory.outcome is not None:
                made[turn.prompt].append((_decision(turn), turn.score, trajectory.outcome))
    wins = [
        0.5 if score == other_score else float((score > other_score) == (outcome > other_outcome))
        for steps in made.values()
        for (decision, score, outcome), (other, other_score, other_outcome) in combinations(steps, 2)
        if decision != other and outcome != other_outcome
    ]
    return math.fsum(wins) / len(wins) if wins else None


def map_score(raw: float, *, valid: bool) -> float:
    """Return a raw score as a reward: 0 for a malformed decision, [0.05, 1] for a valid one.

    The floor keeps the worst valid decision above a malformed one; values outside [0, 1] are clipped first. Raises
    ValueError when a valid decision's raw score is not finite.
    """
    if not valid:
        return 0.0
    if not math.isfinite(raw):
        raise ValueError(f"a step score must be a number in [0, 1], not {raw}")
    return VALID_FLOOR + (1 - VALID_FLOOR) * min(max(raw, 0.0), 1.0)


def step_reward(turn: Turn) -> float | None:
    """Return the mapped score of a turn, None without a score."""
    return None if turn.score is None else map_score(turn.score, valid=turn.format_error is None)


def step_rewards(group: Group) -> list[list[float | None]]:
    """Return the mapped step rewards of each trajectory's planner turns.

    None for turns without a score, turns that are not trained, and trajectories whose outcome could not be scored.
    """
    return [
        [
            None if trajectory.total is None or not turn.trainable else step_reward(turn)
            for turn in trajectory.planner_turns
        ]
        for trajectory in group.trajectories
    ]


def assign_credit(group: Group, *, scheme: Scheme, weight: float) -> None:
    """Fill in the advantages of a group's turns and the parts that they are made of.

    outcome: every turn carries its trajectory's group-normalised total reward; the statistics are over the G
        trajectories, never over turns (Flow-GRPO, arXiv 2510.05592, eq. 7).
    outcome_centered: that, not divided by the group's deviation (Dr. GRPO, arXiv 2503.20783, section 3.2).
    outcome_gated: `outcome`, plus `weight` times the step's score against those of its siblings in the same state.
    process: `outcome_centered` of total rewards that are step scores. Scores that hardly differ train hardly anything;
        divided by the group's deviation their noise would have full size.

    Without step scores, or with weight 0, `outcome_gated` is `outcome` exactly. Trajectories without a total reward get
    zeros, and so do turns that are not trainable.
    """
    normalize = group_normalized if scheme in ("outcome", "outcome_gated") else group_centered
    parts, rewards = normalize(group.totals), step_rewards(group)
    states = [[turn.prompt for turn in trajectory.planner_turns] for trajectory in group.trajectories]
    means = state_means(states, rewards)
    if scheme == "outcome_gated" and all(reward is None for steps in rewards for reward in steps):
        scheme = "outcome"
    if scheme == "outcome_gated":
        advantages = outcome_gated(group.totals, states, rewards, weight=weight)
    else:
        weight, advantages = 0.0, [[part] * len(steps) for part, steps in zip(parts, rewards, strict=True)]
    scored = [total for total in group.totals if total is not None]
    mean, std = fmean(scored) if scored else 0.0, stdev(scored) if len(scored) > 1 else 0.0
    credit = GroupCredit(scheme=scheme, weight=weight, totals=Spread(num=len(scored), mean=mean, std=std))
    columns = zip(group.trajectories, parts, rewards, means, advantages, strict=True)
    for trajectory, part, steps, bases, values in columns:
        trajectory.credit = credit
        for turn, step, base, value in zip(trajectory.planner_turns, steps, bases, values, strict=True):
            turn.step_reward, turn.state_mean = step, base
            turn.outcome_part, turn.advantage = (part, value) if turn.trainable else (0.0, 0.0)
            turn.process_part = turn.advantage - turn.outcome_part
    _note_same_steps(group)


def note_learner_logprobs(
    trajectory: Trajectory, logprobs: Mapping[str, np.ndarray], version_ages: Mapping[int, int]
) -> None:
    """Fill in the learner's log-probs of a trajectory's turns.

    `logprobs` are those of a batch's trained tokens, `[num_loss_tokens]` by the sample's name. Tokens whose version has
    no age in the batch were too old to be trained and become nan.
    """
    turns = trajectory.planner_turns
    for branch, numbers in enumerate(trajectory.branches):
        left = logprobs.get(sample_name(trajectory.id, branch))
        if left is None:
            continue
        for turn in (turns[number] for number in numbers if turns[number].trainable):
            trained = np.flatnonzero([version in version_ages for version in turn.token_versions])
            values = np.full(turn.num_tokens, np.nan, dtype=np.float32)
            here, left = left[: len(trained)], left[len(trained) :]
            values[trained[: len(here)]] = here
            turn.learner_logprobs = packed_floats(values)


def _note_same_steps(group: Group) -> None:
    """Fill in, for each turn, the advantages of all attempts with the same decision after the same prompt.

    Prompts are compared token for token. Attempts that could not be scored are left out.
    """
    made: dict[Hashable, list[float]] = defaultdict(list)
    for trajectory in group.trajectories:
        for turn in trajectory.planner_turns:
            if trajectory.total is not None and turn.advantage is not None:
                made[_decision(turn)].append(turn.advantage)
    for trajectory in group.trajectories:
        for turn in trajectory.planner_turns:
            turn.same_steps = tuple(made[_decision(turn)])


def _decision(turn: Turn) -> Hashable:
    """Return what was decided, and after which prompt; a malformed decision is its text."""
    return turn.prompt, turn.tool_call or turn.text
