"""Credit: from outcomes and step scores to an advantage for every step, and the parts that explain it."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from configs.reward import Credit
from learner.advantages import group_centered, group_normalized, outcome_gated
from learner.samples import build_samples
from learner.types import TrainingSample, sample_name
from reward.types import PrmError, ScoredGroup
from rollout.numbers import packed_millionths
from rollout.types import Trajectory, Turn

VALID_FLOOR = 0.05


def step_rewards(scored: ScoredGroup) -> list[list[float | None]]:
    """Mapped rewards per planner turn: 0 for a malformed one, [0.05, 1] for a valid one, None for an unscored one.

    All None without a PRM, and in trajectories whose outcome could not be scored. None for turns that are not trained.
    """
    trajectories = scored.group.trajectories
    if scored.step_scores is None:
        return [[None] * len(trajectory.planner_turns) for trajectory in trajectories]
    return [
        [
            None
            if raw is None or reward.total is None or not turn.trainable
            else map_score(raw, valid=turn.format_error is None)
            for turn, raw in zip(trajectory.planner_turns, scores, strict=True)
        ]
        for trajectory, reward, scores in zip(trajectories, scored.rewards, scored.step_scores.raw, strict=True)
    ]


def map_score(raw: float, *, valid: bool) -> float:
    """A raw score as a reward: 0 for a malformed decision, [0.05, 1] for a valid one.

    The floor keeps the worst valid decision above a malformed one; values outside [0, 1] are clipped first.
    Raises PrmError when a valid decision's raw score is not finite.
    """
    if not valid:
        return 0.0
    if not math.isfinite(raw):
        raise PrmError(f"the PRM's score is {raw}, not a number in [0, 1]; the step stays unscored")
    return VALID_FLOOR + (1 - VALID_FLOOR) * min(max(raw, 0.0), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and sample standard deviation (n - 1) of `num` numbers; 0 where there are too few."""

    num: int
    mean: float
    std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditParts:
    """`scheme` is the credit that was in force: `outcome` where no step had a score and the recipe asks for scores.

    `totals` spreads over the trajectories' total rewards, `scores` over the group's scored steps. Per trajectory, one
    number per planner turn: `advantages`, the `outcomes` and `processes` that add up to them, and the mapped
    `step_rewards` (None: not scored). `same_steps`, per planner turn, are the advantages of all attempts that made this
    very step; `by_action` spreads over the scored valid steps of each action.
    """

    scheme: Credit
    weight: float
    totals: Spread
    scores: Spread
    advantages: list[list[float]]
    outcomes: list[list[float]]
    processes: list[list[float]]
    step_rewards: list[list[float | None]]
    same_steps: list[list[list[float]]]
    by_action: Mapping[str, Spread]


def credit_parts(scored: ScoredGroup, *, credit: Credit, prm_weight: float) -> CreditParts:
    """The advantages of a group, taken apart. The learner trains on these; whoever explains a step reads the same."""
    rewards = step_rewards(scored)
    scores = [reward for steps in rewards for reward in steps if reward is not None]
    totals = [reward.total for reward in scored.rewards]
    by_outcome: Credit = "outcome_centered" if credit == "outcome_centered" else "outcome"
    scheme: Credit = credit if scores else by_outcome
    advantages = turn_advantages(scored, credit=credit, prm_weight=prm_weight)
    outcomes = turn_advantages(scored, credit=by_outcome, prm_weight=0.0)
    return CreditParts(
        scheme=scheme,
        weight=prm_weight if scheme == "outcome_gated" else 0.0,
        totals=spread_of([total for total in totals if total is not None]),
        scores=spread_of(scores),
        advantages=advantages,
        outcomes=outcomes,
        processes=[
            [advantage - part for advantage, part in zip(*both, strict=True)]
            for both in zip(advantages, outcomes, strict=True)
        ],
        step_rewards=rewards,
        same_steps=_same_steps(scored, advantages),
        by_action=_scores_by_action(scored, rewards),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedStep:
    """A train step with all that explains it. `policy_version`, `metrics` and `skipped` are those of its `StepResult`.
    `credit` is, by group, what was trained on. `turn_logprobs` are the learner's, by trajectory and turn: packed
    strings (`rollout.numbers`), with nan at tokens that were too old to be trained; None for a turn that was not."""

    policy_version: int
    metrics: Mapping[str, float]
    skipped: str | None = None
    credit: Mapping[str, CreditParts]
    turn_logprobs: Mapping[str, Sequence[str | None]] = field(default_factory=dict)

    @property
    def num_trajectories(self) -> int:
        return sum(len(parts.advantages) for parts in self.credit.values())


def turn_logprobs(
    trajectory: Trajectory, logprobs: Mapping[str, np.ndarray], version_ages: Mapping[int, int]
) -> list[str | None]:
    """Of the learner's log-probs of a batch's trained tokens, `[num_loss_tokens]` by the sample's name, those of the
    trajectory's turns, as `CreditedStep` has them. A token is too old where its version has no age in the batch."""
    turns = trajectory.planner_turns
    found: dict[int, str] = {}
    for branch, numbers in enumerate(trajectory.branches):
        own = logprobs.get(sample_name(trajectory.id, branch))
        if own is None:
            continue
        for number in (number for number in numbers if turns[number].trainable):
            versions = turns[number].completion.token_versions
            trained = np.flatnonzero([version in version_ages for version in versions])
            values = np.full(len(versions), np.nan)
            here, own = own[: len(trained)], own[len(trained) :]
            values[trained[: len(here)]] = here
            found[number] = packed_millionths(values)
    numbers_of_planner = count()
    return [found.get(next(numbers_of_planner)) if turn.role == "planner" else None for turn in trajectory.turns]


def spread_of(values: Sequence[float]) -> Spread:
    """Of plain numbers, in any order."""
    num = len(values)
    if num < 2:
        return Spread(num=num, mean=values[0] if values else 0.0, std=0.0)
    mean = math.fsum(values) / num
    return Spread(num=num, mean=mean, std=math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (num - 1)))


def _same_steps(scored: ScoredGroup, advantages: Sequence[Sequence[float]]) -> list[list[list[float]]]:
    """Per trajectory and planner turn: the advantages of all attempts, its own among them, that made this decision in
    this state, that is after the same prompt token for token. Attempts that could not be scored are left out."""
    made: dict[Hashable, list[float]] = defaultdict(list)
    trajectories = scored.group.trajectories
    for trajectory, reward, values in zip(trajectories, scored.rewards, advantages, strict=True):
        for turn, value in zip(trajectory.planner_turns, values, strict=True):
            if reward.total is not None:
                made[_decision(turn)].append(value)
    return [[made[_decision(turn)] for turn in trajectory.planner_turns] for trajectory in trajectories]


def _scores_by_action(scored: ScoredGroup, rewards: Sequence[Sequence[float | None]]) -> Mapping[str, Spread]:
    """Mapped step rewards of the group's valid steps, by action: the pool that a step is credited against holds all
    actions, and some score higher than others."""
    found: dict[str, list[float]] = defaultdict(list)
    for trajectory, steps in zip(scored.group.trajectories, rewards, strict=True):
        for turn, reward in zip(trajectory.planner_turns, steps, strict=True):
            if turn.tool_call is not None and reward is not None:
                found[turn.tool_call.name].append(reward)
    return {action: spread_of(values) for action, values in found.items()}


def _decision(turn: Turn) -> Hashable:
    """What was decided, and after what; a malformed decision is its text."""
    return turn.prompt_token_ids, turn.tool_call or turn.completion.text


def group_samples(
    scored: ScoredGroup,
    advantages: Sequence[Sequence[float]],
    *,
    temperature: float,
    version_ages: Mapping[int, int] | None = None,
) -> list[TrainingSample]:
    """The training samples of a group with these advantages, one per planner turn of each trajectory; for
    `version_ages` see `samples_of`. Trajectories that could not be scored, or that the overlong rule keeps out of
    training, have none."""
    trained = [None if reward.total is None else own for reward, own in zip(scored.rewards, advantages, strict=True)]
    return build_samples(scored.group, trained, temperature=temperature, version_ages=version_ages)


def turn_advantages(scored: ScoredGroup, *, credit: Credit, prm_weight: float) -> list[list[float]]:
    """One advantage per planner turn of each trajectory.

    outcome: every turn carries its trajectory's group-normalised total reward; the statistics are over the G
        trajectories, never over turns (Flow-GRPO, arXiv 2510.05592, eq. 7).
    outcome_centered: that, not divided by the group's deviation (Dr. GRPO, arXiv 2503.20783, section 3.2).
    outcome_gated: `outcome`, plus `prm_weight` times the step's score against the pool of the group's steps.

    Without step scores, or with weight 0, `outcome_gated` is `outcome` exactly. Trajectories without a
    total reward get zeros, and so do turns that are not trainable.
    """
    totals = [reward.total for reward in scored.rewards]
    trajectories = scored.group.trajectories
    if credit == "outcome_gated":
        advantages = outcome_gated(totals, step_rewards(scored), weight=prm_weight)
    else:
        by_outcome = group_centered(totals) if credit == "outcome_centered" else group_normalized(totals)
        advantages = [
            [advantage] * len(trajectory.planner_turns)
            for advantage, trajectory in zip(by_outcome, trajectories, strict=True)
        ]
    return [
        [own if turn.trainable else 0.0 for turn, own in zip(trajectory.planner_turns, owns, strict=True)]
        for trajectory, owns in zip(trajectories, advantages, strict=True)
    ]
