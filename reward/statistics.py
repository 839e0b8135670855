"""Statistics of the rollouts since the last batch, over all drawn groups and not only the kept ones."""

from collections import Counter, defaultdict
from collections.abc import Mapping

from rollout.types import Group

SATURATED = 0.02

Facts = dict[str, float]
"""Plain counts and sums; they add up over groups. A failed trajectory stays in every denominator but `scored`.

`prm_*` are over steps with a PRM score.
"""


def rollout_metrics(facts: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of facts that were added up over groups; there are no means without trajectories."""
    sums = defaultdict(float, facts)
    num = sums["trajectories"]
    metrics = {"rollout/trajectories": float(num)}
    if not num:
        return metrics
    if sums["scored"]:
        metrics["rollout/solve_rate"] = sums["right"] / sums["scored"]
    return {
        **metrics,
        **{f"rollout/{name}": sums[name] / num for name in ("turns", "sampled_tokens", "format_errors", "tool_errors")},
        **{f"rollout/{name}_share": sums[name] / num for name in ("truncated", "failed", "unscored")},
        "rollout/repeat_share": sums["repeats"] / max(sums["turns"], 1),
        "rollout/infrastructure_failures": float(sums["infrastructure"]),
        **_prm_metrics(sums),
        **_guided_metrics(sums),
    }


def _prm_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return nothing without a PRM, and no means where it scored nothing."""
    metrics: dict[str, float] = {}
    steps = sums["prm_steps"]
    if asked := steps + sums["prm_unscored"]:
        metrics["prm/unscored_share"] = sums["prm_unscored"] / asked
    if not steps:
        return metrics
    return metrics | {"prm/score": sums["prm_score"] / steps, "prm/saturated_share": sums["prm_saturated"] / steps}


def _guided_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return nothing where no group had guided attempts."""
    if not sums["guided_groups"]:
        return {}
    return {
        "guided/groups": sums["guided_groups"],
        "guided/rescued_share": sums["rescued"] / sums["guided_groups"],
        "guided/sampled_tokens": sums["guided_tokens"],
    }


def group_facts(group: Group) -> Facts:
    """Return the counts of a judged group; those of the PRM are left out where no steps were to be scored."""
    trajectories, stops = group.trajectories, Counter(trajectory.stop_reason for trajectory in group.trajectories)
    outcomes = [outcome for outcome in group.outcomes if outcome is not None]
    turns = [turn for trajectory in trajectories for turn in trajectory.planner_turns]
    calls = [(one.id, turn.tool_call) for one in trajectories for turn in one.planner_turns if turn.tool_call]
    facts: Facts = {
        "trajectories": len(trajectories),
        "scored": len(outcomes),
        "unscored": len(trajectories) - len(outcomes),
        "right": sum(outcomes),
        "turns": len(turns),
        "sampled_tokens": sum(trajectory.num_sampled_tokens for trajectory in trajectories),
        "format_errors": sum(trajectory.num_format_errors for trajectory in trajectories),
        "truncated": sum(trajectory.truncated for trajectory in trajectories),
        "tool_errors": sum(turn.tool_result is not None and turn.tool_result.error is not None for turn in turns),
        "repeats": len(calls) - len(set(calls)),
        "failed": stops["failed"],
        "infrastructure": stops["infrastructure"],
        "generate_s": sum(turn.generate_s for turn in turns),
        "tool_s": sum(turn.tool_s for turn in turns),
    }
    if all(trajectory.prm_digest is None for trajectory in trajectories):
        return facts
    scores = [turn.score for turn in turns if turn.score is not None]
    return {
        **facts,
        "prm_steps": len(scores),
        "prm_unscored": len(turns) - len(scores),
        "prm_saturated": sum(not SATURATED <= score <= 1 - SATURATED for score in scores),
        "prm_score": sum(scores),
    }
