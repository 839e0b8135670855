"""What the rollouts since the last batch looked like, over all drawn groups and not only the kept ones."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from reward.types import ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatistics:
    """Plain counts; they add up over groups. A failed trajectory stays in every denominator but `scored`."""

    trajectories: int = 0
    scored: int = 0
    right: float = 0.0
    turns: int = 0
    sampled_tokens: int = 0
    format_errors: int = 0
    truncated: int = 0
    tool_errors: int = 0
    infrastructure: int = 0

    def __add__(self, other: "RolloutStatistics") -> "RolloutStatistics":
        return RolloutStatistics(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def metrics(self) -> Mapping[str, float]:
        per_trajectory = max(self.trajectories, 1)
        return {
            "rollout/solve_rate": self.right / max(self.scored, 1),
            "rollout/trajectories": float(self.trajectories),
            "rollout/turns": self.turns / per_trajectory,
            "rollout/sampled_tokens": self.sampled_tokens / per_trajectory,
            "rollout/format_errors": self.format_errors / per_trajectory,
            "rollout/truncated_share": self.truncated / per_trajectory,
            "rollout/tool_errors": self.tool_errors / per_trajectory,
            "rollout/infrastructure_failures": float(self.infrastructure),
        }


def group_statistics(scored: ScoredGroup) -> RolloutStatistics:
    trajectories = scored.group.trajectories
    outcomes = [outcome for outcome in scored.outcomes if outcome is not None]
    turns = [turn for trajectory in trajectories for turn in trajectory.planner_turns]
    return RolloutStatistics(
        trajectories=len(trajectories),
        scored=len(outcomes),
        right=sum(outcomes),
        turns=len(turns),
        sampled_tokens=sum(trajectory.num_sampled_tokens for trajectory in trajectories),
        format_errors=sum(trajectory.num_format_errors for trajectory in trajectories),
        truncated=sum(trajectory.truncated for trajectory in trajectories),
        tool_errors=sum(turn.tool_result is not None and turn.tool_result.error is not None for turn in turns),
        infrastructure=sum(trajectory.stop_reason == "infrastructure" for trajectory in trajectories),
    )
