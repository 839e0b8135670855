"""Raw PRM output as step rewards."""

from reward.prm import map_score
from reward.types import ScoredGroup


def step_rewards(scored: ScoredGroup) -> list[list[float | None]]:
    """Mapped rewards per planner turn: 0 for a malformed one, [0.05, 1] for a valid one, None for an unscored one.

    All None without a PRM, and in trajectories whose outcome could not be scored.
    """
    trajectories = scored.group.trajectories
    if scored.step_scores is None:
        return [[None] * len(trajectory.planner_turns) for trajectory in trajectories]
    return [
        [
            None if raw is None or reward.total is None else map_score(raw, valid=turn.tool_call is not None)
            for turn, raw in zip(trajectory.planner_turns, scores, strict=True)
        ]
        for trajectory, reward, scores in zip(trajectories, scored.rewards, scored.step_scores.raw, strict=True)
    ]
