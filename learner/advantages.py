"""Group-relative advantages: of trajectories, and of their steps where a process reward model scored them."""

import math
from collections.abc import Sequence

EPS = 1e-6
MIN_STD = 1e-3
"""A group below this standard deviation has no signal: its residue would be rounding noise blown up to full size."""


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
    if len(scored) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(scored) / len(scored)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / (len(scored) - 1))
    if std < MIN_STD:
        return [0.0] * len(rewards)
    return [0.0 if reward is None else reward - mean for reward in rewards]


def outcome_gated(
    outcomes: Sequence[float | None], step_scores: Sequence[Sequence[float | None]], *, weight: float = 0.5
) -> list[list[float]]:
    """Return the advantage of each step: z(outcome) + weight * (score - pool mean) / (pool std + EPS).

    z is `group_normalized` over the trajectories; the pool is every scored step of the group's scored
    trajectories. `outcomes` holds one number per trajectory, `step_scores` one list of step scores per
    trajectory; returns the shape of `step_scores`. The outcome is the gate: a group without a difference in
    outcomes gets zeros, however the scores differ, so that pleasing the scorer alone is never reinforced. A step
    without a score (None) keeps the outcome's part only; with `weight` 0, or no scores at all, the result is the
    outcome broadcast exactly. Trajectories without an outcome (None) get zeros and stay out of every statistic.
    """
    outcome_part = group_normalized(outcomes)
    if not any(outcome_part):
        return [[0.0] * len(steps) for steps in step_scores]
    scored = [
        steps if outcome is not None else [None] * len(steps)
        for outcome, steps in zip(outcomes, step_scores, strict=True)
    ]
    local = pooled(scored)
    return [
        [part + weight * step if weight else part for step in steps]
        for part, steps in zip(outcome_part, local, strict=True)
    ]


def pooled(step_scores: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Compare every step with all of its group: (score - pool mean) / (pool std + EPS), in the same shape.

    The statistics and their guards are those of `group_normalized`; None is an unscored step, and gets 0.
    """
    rest = iter(group_normalized([score for steps in step_scores for score in steps]))
    return [[next(rest) for _ in steps] for steps in step_scores]
