"""Rewards to training samples: which credit each trajectory, and each of its steps, receives."""

from collections.abc import Hashable, Mapping, Sequence

from configs.reward import Credit
from learner.advantages import (
    group_normalized,
    min_form,
    outcome_gated,
    pooled,
    process_supervised,
    step_bandit,
)
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
    """The training samples of a group, under the recipe's credit; for `version_ages` see `build_sample`."""
    advantages = turn_advantages(scored, credit=credit, prm_weight=prm_weight)
    return build_samples(scored.group, advantages, temperature=temperature, version_ages=version_ages)


def turn_advantages(scored: ScoredGroup, *, credit: Credit, prm_weight: float) -> list[list[float]]:
    """One advantage per planner turn of each trajectory.

    outcome: every turn carries its trajectory's group-normalised total reward; the statistics are over the G
        trajectories, never over turns (Flow-GRPO, arXiv 2510.05592, eq. 7).
    outcome_gated: that, plus `prm_weight` times the step's score against the pool of the group's steps.
    process_supervision: the normalised step rewards still to come (DeepSeekMath, arXiv 2402.03300, 4.1.3).
    min_form: the lowest step reward still to come, softly, against the pool (PURE, arXiv 2504.15275).
    step_bandit: decisions against siblings' decisions in the same state (AgentFlow-Pro).

    Without step scores, or with weight 0 in `outcome_gated`, every scheme is `outcome` exactly. Trajectories
    that could not be scored train nothing.
    """
    totals = [reward.total for reward in scored.rewards]
    lengths = [len(trajectory.planner_turns) for trajectory in scored.group.trajectories]
    rewards = step_rewards(scored)
    if credit == "outcome" or not any(reward is not None for steps in rewards for reward in steps):
        outcome = group_normalized(totals)
        return [[advantage] * length for advantage, length in zip(outcome, lengths, strict=True)]
    match credit:
        case "outcome_gated":
            return outcome_gated(totals, rewards, weight=prm_weight)
        case "process_supervision":
            return process_supervised(rewards, [[1] * length for length in lengths])
        case "min_form":
            return pooled(_returns_to_go(rewards))
        case "step_bandit":
            return step_bandit(_states(scored), rewards)


def _returns_to_go(rewards: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """In min form, over rewards moved to [-1, 0]: where the worst step is behind, the return must be the best there
    is and not the worst. An unscored step has no return."""
    returns = min_form([[None if reward is None else reward - 1 for reward in steps] for steps in rewards])
    return [
        [None if reward is None else value for reward, value in zip(steps, values, strict=True)]
        for steps, values in zip(rewards, returns, strict=True)
    ]


def _states(scored: ScoredGroup) -> list[list[Hashable]]:
    """What the planner saw at each turn: token for token the same, or another state."""
    return [[turn.prompt_token_ids for turn in trajectory.planner_turns] for trajectory in scored.group.trajectories]
