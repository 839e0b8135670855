"""Rewards to training samples: which credit each trajectory, and each of its steps, receives."""

from collections.abc import Mapping

from configs.reward import Credit
from learner.advantages import group_normalized, outcome_gated
from learner.samples import build_samples
from learner.types import TrainingSample
from reward.prm_scores import step_rewards
from reward.types import ScoredGroup


def group_samples(
    scored: ScoredGroup,
    *,
    temperature: float,
    credit: Credit = "outcome",
    prm_weight: float = 0.5,
    version_ages: Mapping[int, int] | None = None,
) -> list[TrainingSample]:
    """The training samples of a group, under the recipe's credit; for `version_ages` see `build_sample`. Trajectories
    that could not be scored, or that the overlong rule keeps out of training, have none."""
    advantages = turn_advantages(scored, credit=credit, prm_weight=prm_weight)
    trained = [None if reward.total is None else own for reward, own in zip(scored.rewards, advantages, strict=True)]
    return build_samples(scored.group, trained, temperature=temperature, version_ages=version_ages)


def turn_advantages(scored: ScoredGroup, *, credit: Credit, prm_weight: float) -> list[list[float]]:
    """One advantage per planner turn of each trajectory.

    outcome: every turn carries its trajectory's group-normalised total reward; the statistics are over the G
        trajectories, never over turns (Flow-GRPO, arXiv 2510.05592, eq. 7).
    outcome_gated: that, plus `prm_weight` times the step's score against the pool of the group's steps.

    Without step scores, or with weight 0, `outcome_gated` is `outcome` exactly. Trajectories without a
    total reward get zeros.
    """
    totals = [reward.total for reward in scored.rewards]
    if credit == "outcome_gated":
        return outcome_gated(totals, step_rewards(scored), weight=prm_weight)
    return [
        [advantage] * len(trajectory.planner_turns)
        for advantage, trajectory in zip(group_normalized(totals), scored.group.trajectories, strict=True)
    ]
