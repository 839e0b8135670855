"""What a step's advantage is to be read against: siblings that made the very same step, and the group's steps alike."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from reward.credit_parts import Spread, spread_of
from reward.types import ScoredGroup
from rollout.types import Turn


def same_steps(scored: ScoredGroup, advantages: Sequence[Sequence[float]]) -> list[list[list[float]]]:
    """Per trajectory and planner turn: the advantages of all attempts, its own among them, that made this decision in
    this state, that is after the same prompt token for token. Attempts that could not be scored are left out."""
    made: dict[Hashable, list[float]] = defaultdict(list)
    trajectories = scored.group.trajectories
    for trajectory, reward, values in zip(trajectories, scored.rewards, advantages, strict=True):
        for turn, value in zip(trajectory.planner_turns, values, strict=True):
            if reward.total is not None:
                made[_decision(turn)].append(value)
    return [[made[_decision(turn)] for turn in trajectory.planner_turns] for trajectory in trajectories]


def scores_by_action(scored: ScoredGroup, rewards: Sequence[Sequence[float | None]]) -> Mapping[str, Spread]:
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
