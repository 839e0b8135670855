"""Where an advantage came from: the parts that `reward.compose` adds up, with the numbers they are made of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from configs.reward import Credit
from learner.advantages import group_normalized
from reward.compose import turn_advantages
from reward.prm_scores import step_rewards
from reward.types import ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and sample standard deviation (n - 1) of `num` numbers; 0 where there are too few."""

    num: int
    mean: float
    std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditParts:
    """`scheme` is the credit that was in force: `outcome` where no step had a score, whatever the recipe says.

    `totals` spreads over the trajectories' total rewards, `scores` over the group's scored steps. Per trajectory, one
    number per planner turn: `advantages`, the `outcomes` and `processes` that add up to them, and the mapped
    `step_rewards` (None: not scored).
    """

    scheme: Credit
    weight: float
    totals: Spread
    scores: Spread
    advantages: list[list[float]]
    outcomes: list[list[float]]
    processes: list[list[float]]
    step_rewards: list[list[float | None]]


def credit_parts(scored: ScoredGroup, *, credit: Credit, prm_weight: float) -> CreditParts:
    """The advantages of a group as the learner gets them, taken apart."""
    rewards = step_rewards(scored)
    scores = [reward for steps in rewards for reward in steps if reward is not None]
    totals = [reward.total for reward in scored.rewards]
    scheme: Credit = credit if scores else "outcome"
    advantages = turn_advantages(scored, credit=credit, prm_weight=prm_weight)
    by_outcome = group_normalized(totals)
    return CreditParts(
        scheme=scheme,
        weight=prm_weight if scheme == "outcome_gated" else 0.0,
        totals=spread_of([total for total in totals if total is not None]),
        scores=spread_of(scores),
        advantages=advantages,
        outcomes=[[part] * len(steps) for part, steps in zip(by_outcome, advantages, strict=True)],
        processes=[
            [advantage - part for advantage in steps] for part, steps in zip(by_outcome, advantages, strict=True)
        ],
        step_rewards=rewards,
    )


def spread_of(values: Sequence[float]) -> Spread:
    """Of plain numbers, in any order."""
    num = len(values)
    if num < 2:
        return Spread(num=num, mean=values[0] if values else 0.0, std=0.0)
    mean = math.fsum(values) / num
    return Spread(num=num, mean=mean, std=math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (num - 1)))
