"""Rewards to training samples: which credit each trajectory, and each of its tokens, receives."""

from learner.advantages import group_normalized
from learner.samples import build_samples
from learner.types import TrainingSample
from reward.types import ScoredGroup


def group_samples(scored: ScoredGroup, *, temperature: float) -> list[TrainingSample]:
    """Outcome broadcast: every planner token carries its trajectory's group-normalised total reward.

    The statistics are over the G trajectories, never over turns (Flow-GRPO, arXiv 2510.05592, eq. 7).
    """
    advantages = group_normalized([reward.total for reward in scored.rewards])
    return build_samples(scored.group, advantages, temperature=temperature)
