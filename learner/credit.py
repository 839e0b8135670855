"""Credit: group-relative advantages of trajectories."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean, stdev

import numpy as np

from configs.reward import Credit as Scheme
from learner.types import sample_name
from rollout.types import Group, GroupCredit, Spread, Trajectory, Turn, packed_floats

EPS = 1e-6
MIN_STD = 1e-3
"""A group below this standard deviation has no signal: its residue would be rounding noise blown up to full size."""
VALID_FLOOR = 0.05


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


def assign_credit(group: Group, *, scheme: Scheme) -> None:
    """Fill in the advantages of a group's turns: all trainable turns of a trajectory have that of its total reward.

    outcome, outcome_guided: group-normalised; the statistics are over the G trajectories, never over turns (Flow-GRPO,
        arXiv 2510.05592, eq. 7).
    outcome_centered: not divided by the group's deviation (Dr. GRPO, arXiv 2503.20783, section 3.2).
    process: `outcome_centered` of total rewards that are step scores. Scores that hardly differ train hardly anything;
        divided by the group's deviation their noise would have full size.

    Trajectories without a total reward get zeros, and so do turns that are not trainable.
    """
    normalize = group_normalized if scheme in ("outcome", "outcome_guided") else group_centered
    scored = [total for total in group.totals if total is not None]
    mean, std = fmean(scored) if scored else 0.0, stdev(scored) if len(scored) > 1 else 0.0
    credit = GroupCredit(scheme=scheme, totals=Spread(num=len(scored), mean=mean, std=std))
    for trajectory, advantage in zip(group.trajectories, normalize(group.totals), strict=True):
        trajectory.credit = credit
        for turn in trajectory.planner_turns:
            turn.advantage = advantage if turn.trainable else 0.0
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
