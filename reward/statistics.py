"""Statistics of the rollouts since the last batch, over all drawn groups and not only the kept ones."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

from rollout.types import Group, Trajectory

SATURATED = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatistics:
    """Plain counts and sums; they add up over groups. A failed trajectory stays in every denominator but `scored`.

    `prm_*` are over steps with a PRM score; their lengths are in characters of the decision. `prm_pairs` are pairs of
    attempts at one task with different outcomes, ranked by the mean of their scores: `prm_wins` of them rightly, a tie
    counting half; `prm_wins_variance` is the variance of these under a PRM that knows nothing.
    """

    trajectories: int = 0
    scored: int = 0
    right: float = 0.0
    turns: int = 0
    sampled_tokens: int = 0
    format_errors: int = 0
    truncated: int = 0
    tool_errors: int = 0
    repeats: int = 0
    infrastructure: int = 0
    prm_steps: int = 0
    prm_unscored: int = 0
    prm_saturated: int = 0
    prm_score: float = 0.0
    prm_score_squared: float = 0.0
    prm_length: float = 0.0
    prm_length_squared: float = 0.0
    prm_score_length: float = 0.0
    prm_pairs: int = 0
    prm_wins: float = 0.0
    prm_wins_variance: float = 0.0

    def __add__(self, other: "RolloutStatistics") -> "RolloutStatistics":
        return RolloutStatistics(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics; there are no means without trajectories."""
        count = {"rollout/trajectories": float(self.trajectories)}
        if not self.trajectories:
            return count
        per_trajectory = self.trajectories
        return {
            **count,
            **({"rollout/solve_rate": self.right / self.scored} if self.scored else {}),
            "rollout/turns": self.turns / per_trajectory,
            "rollout/sampled_tokens": self.sampled_tokens / per_trajectory,
            "rollout/format_errors": self.format_errors / per_trajectory,
            "rollout/truncated_share": self.truncated / per_trajectory,
            "rollout/tool_errors": self.tool_errors / per_trajectory,
            "rollout/repeat_share": self.repeats / max(self.turns, 1),
            "rollout/infrastructure_failures": float(self.infrastructure),
            **self._prm_metrics(),
        }

    def _prm_metrics(self) -> Mapping[str, float]:
        """Return nothing without a PRM, and no means where it scored nothing."""
        asked = self.prm_steps + self.prm_unscored
        unscored = {"prm/unscored_share": self.prm_unscored / asked} if asked else {}
        if not self.prm_steps:
            return unscored
        return unscored | {
            "prm/score": self.prm_score / self.prm_steps,
            "prm/saturated_share": self.prm_saturated / self.prm_steps,
            "prm/length_correlation": self._length_correlation(),
            **self._ranking(),
        }

    def _ranking(self) -> Mapping[str, float]:
        """Return Mann-Whitney's U within each group, added up; nothing where no siblings differ in outcome."""
        if not self.prm_pairs:
            return {}
        return {
            "prm/sibling_auroc": self.prm_wins / self.prm_pairs,
            "prm/sibling_z": (self.prm_wins - self.prm_pairs / 2) / math.sqrt(self.prm_wins_variance),
        }

    def _length_correlation(self) -> float:
        """Pearson's; 0 where one side does not vary."""
        count = self.prm_steps
        score, length = self.prm_score / count, self.prm_length / count
        variance = (self.prm_score_squared / count - score**2) * (self.prm_length_squared / count - length**2)
        covariance = self.prm_score_length / count - score * length
        return covariance / math.sqrt(variance) if variance > 1e-9 else 0.0


def statistics_of(facts: Mapping[str, float]) -> RolloutStatistics:
    """Return the statistics in facts that were added up over groups; other facts are left out."""
    known: dict[str, Any] = {f.name: facts[f.name] for f in fields(RolloutStatistics) if f.name in facts}
    return RolloutStatistics(**known)


def group_statistics(group: Group) -> RolloutStatistics:
    """Return the counts of a judged group."""
    trajectories = group.trajectories
    outcomes = [outcome for outcome in group.outcomes if outcome is not None]
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
        repeats=sum(map(_num_repeats, trajectories)),
        infrastructure=sum(trajectory.stop_reason == "infrastructure" for trajectory in trajectories),
    ) + step_statistics(group)


def step_statistics(group: Group) -> RolloutStatistics:
    """Return the `prm_*` counts of a group; all are 0 where no steps were to be scored."""
    if all(trajectory.prm_digest is None for trajectory in group.trajectories):
        return RolloutStatistics()
    turns = [turn for trajectory in group.trajectories for turn in trajectory.planner_turns]
    pairs = [(turn.score, float(len(turn.text))) for turn in turns if turn.score is not None]
    return RolloutStatistics(
        prm_steps=len(pairs),
        prm_unscored=len(turns) - len(pairs),
        prm_saturated=sum(not SATURATED <= score <= 1 - SATURATED for score, _ in pairs),
        prm_score=sum(score for score, _ in pairs),
        prm_score_squared=sum(score**2 for score, _ in pairs),
        prm_length=sum(length for _, length in pairs),
        prm_length_squared=sum(length**2 for _, length in pairs),
        prm_score_length=sum(score * length for score, length in pairs),
    ) + ranking_statistics(group.outcomes, [[turn.score for turn in one.planner_turns] for one in group.trajectories])


def ranking_statistics(
    outcomes: Sequence[float | None], step_scores: Sequence[Sequence[float | None]]
) -> RolloutStatistics:
    """Return the counts of pairs in one group.

    A trajectory without an outcome, or with a step that has no score, is in no pair. With more than two outcomes, which
    a custom scorer may give, this is Jonckheere's and Terpstra's statistic instead of Mann and Whitney's.
    """
    # Rounded, for the mean of equal scores depends on how many there are.
    means = [
        (round(outcome, 12), round(fmean(known), 12))
        for outcome, steps in zip(outcomes, step_scores, strict=True)
        if outcome is not None
        and (known := [score for score in steps if score is not None])
        and len(known) == len(steps)
    ]
    pairs = [(above, below) for better, above in means for worse, below in means if better > worse]
    alike = Counter(outcome for outcome, _ in means).values()
    return RolloutStatistics(
        prm_pairs=len(pairs),
        prm_wins=sum((above > below) + 0.5 * (above == below) for above, below in pairs),
        prm_wins_variance=(_spread(len(means)) - sum(map(_spread, alike))) / 72,
    )


def _spread(num: int) -> int:
    """Return what `num` attempts add to the variance of pairs in the right order (Terpstra, Indag. Math. 14, 1952)."""
    return num**2 * (2 * num + 3)


def _num_repeats(trajectory: Trajectory) -> int:
    """Count tool calls that an earlier turn of the trajectory made already."""
    calls = [turn.tool_call for turn in trajectory.planner_turns if turn.tool_call is not None]
    return len(calls) - len(set(calls))
