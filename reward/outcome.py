"""The reward of an outcome, and how length shapes it."""

from configs.learner import LearnerConfig
from reward.scorers import score_answer
from reward.types import Reward, ScoredGroup
from rollout.types import Trajectory, TrajectoryGroup, Turn


def soft_overlong_penalty(length: int, *, max_length: int, cache_length: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to max - cache tokens, then falling
    linearly to -1 at `max_length`, -1 beyond. With `cache_length` 0 there is no slope, only the step."""
    if length <= max_length - cache_length:
        return 0.0
    if length > max_length or cache_length == 0:
        return -1.0
    return (max_length - cache_length - length) / cache_length


UNSCORABLE = Reward(outcome=None, total=None, parts={})


class OutcomeReward:
    """Scores with the task's exact scorer; the overlong rule shapes `total`, never `outcome`."""

    def __init__(self, learner: LearnerConfig, *, max_turn_tokens: int) -> None:
        self._overlong = learner.overlong
        self._cache_tokens = learner.overlong_cache_tokens
        self._max_turn_tokens = max_turn_tokens

    def score_group(self, group: TrajectoryGroup) -> ScoredGroup:
        return ScoredGroup(group=group, rewards=tuple(self.score(trajectory) for trajectory in group.trajectories))

    def score(self, trajectory: Trajectory) -> Reward:
        """Infrastructure faults are unscorable, not wrong; so is a cut trajectory under `filter`."""
        if trajectory.stop_reason == "infrastructure":
            return UNSCORABLE
        outcome = score_answer(trajectory.task, trajectory.answer)
        if self._overlong == "filter" and trajectory.truncated:
            return Reward(outcome=outcome, total=None, parts={})
        parts = {"outcome": outcome}
        if self._overlong == "soft":
            parts["overlong"] = min(map(self._penalty, trajectory.planner_turns), default=0.0)
        return Reward(outcome=outcome, total=sum(parts.values()), parts=parts)

    def _penalty(self, turn: Turn) -> float:
        length = len(turn.completion.token_ids)
        return soft_overlong_penalty(length, max_length=self._max_turn_tokens, cache_length=self._cache_tokens)
