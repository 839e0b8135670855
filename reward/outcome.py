"""The reward of an outcome, and how length shapes it."""

from configs.learner import FilterOverlongConfig, LearnerConfig, SoftOverlongConfig
from reward.scorers import score_answer
from reward.types import Reward, ScoredGroup
from rollout.types import Trajectory, TrajectoryGroup


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
    """Scores with the task's scorer; the overlong rule shapes `total`, never `outcome`."""

    def __init__(self, learner: LearnerConfig, *, max_turn_tokens: int) -> None:
        self._overlong = learner.overlong
        self._max_turn_tokens = max_turn_tokens

    def score_group(self, group: TrajectoryGroup) -> ScoredGroup:
        return ScoredGroup(group=group, rewards=tuple(self.score(trajectory) for trajectory in group.trajectories))

    def score(self, trajectory: Trajectory) -> Reward:
        """Infrastructure faults are unscorable, not wrong; so is a cut trajectory under `filter`, and an answer of
        which a scorer of one's own cannot tell. Raises OwnCodeError."""
        if trajectory.stop_reason == "infrastructure":
            return UNSCORABLE
        outcome = score_answer(trajectory.task, trajectory.answer, trajectory.turns)
        if outcome is None:
            return UNSCORABLE
        if isinstance(self._overlong, FilterOverlongConfig) and trajectory.truncated:
            return Reward(outcome=outcome, total=None, parts={})
        parts = {"outcome": outcome}
        if isinstance(self._overlong, SoftOverlongConfig):
            lengths = (len(turn.completion.token_ids) for turn in trajectory.planner_turns)
            parts["overlong"] = min((self._penalty(length, self._overlong) for length in lengths), default=0.0)
        return Reward(outcome=outcome, total=sum(parts.values()), parts=parts)

    def _penalty(self, length: int, soft: SoftOverlongConfig) -> float:
        return soft_overlong_penalty(length, max_length=self._max_turn_tokens, cache_length=soft.cache_tokens)
