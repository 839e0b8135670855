"""Raw PRM output as step rewards."""

import math

from reward.types import PrmError, ScoredGroup

VALID_FLOOR = 0.05


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
