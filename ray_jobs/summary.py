"""The summary of a run: the numbers a reader is asked to believe, and where they come from."""

from collections.abc import Mapping
from typing import Any

from configs.run import RunConfig
from ray_jobs.phases import Evaluation
from ray_jobs.progress import TrainingTotals
from reward.paired import compare_paired


def summarize(
    config: RunConfig,
    *,
    untouched: Evaluation,
    before: Evaluation,
    after: Evaluation,
    cold_start: Mapping[str, Any],
    totals: TrainingTotals,
    phases: Mapping[str, float],
) -> dict[str, Any]:
    """Before is the cold-started policy, after the RL-trained one, on the same tasks."""
    comparison = compare_paired(before.right, after.right)
    train_wall_s = phases["reinforce"]
    counts = totals.counts
    return {
        "solve_rate_untouched": _rate(untouched.right),
        "num_untouched_tasks": len(untouched.right),
        "solve_rate_before": _rate(before.right),
        "solve_rate_after": _rate(after.right),
        "num_eval_tasks": len(after.right),
        "solve_rate_gain_ci95": list(comparison.ci95),
        "mcnemar_p": comparison.p,
        "verdict": comparison.verdict,
        "by_dataset": _by_dataset(before, after),
        "wall_s": sum(phases.values()),
        "train_wall_s": train_wall_s,
        "phases": dict(phases),
        "num_steps": totals.num_steps,
        "num_trajectories": totals.rollouts.trajectories,
        "trajectories_per_s": totals.rollouts.trajectories / train_wall_s,
        "rollout_tokens_per_s": totals.rollouts.sampled_tokens / train_wall_s,
        "learner_tokens_per_s": totals.packed_tokens / max(totals.learner_s, 1e-9),
        "learner_wait_s": totals.waited_s,
        "staleness": {
            "mean": sum(totals.staleness) / max(len(totals.staleness), 1),
            "max": max(totals.staleness, default=0.0),
        },
        "groups": {
            "drawn": counts.drawn,
            "trained": counts.trained,
            "filtered": counts.filtered,
            "failed": counts.failed,
            "live_at_end": counts.outstanding,
        },
        "versions_published": totals.versions_published,
        "versions_acked": totals.versions_acked,
        "logprob_gap_version0": totals.logprob_gap_version0,
        "cold_start": {**cold_start, "wall_s": phases["cold_start"]},
        "pipeline_depth": config.pipeline_depth,
        "seed": config.seed,
    }


def _rate(right: list[bool]) -> float | None:
    return sum(right) / len(right) if right else None


def _by_dataset(before: Evaluation, after: Evaluation) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    for trajectory, was_right, is_right in zip(before.trajectories, before.right, after.right, strict=True):
        row = table.setdefault(trajectory.task.dataset, {"num": 0, "before": 0.0, "after": 0.0})
        row["num"] += 1
        row["before"] += was_right
        row["after"] += is_right
    for row in table.values():
        row["before"] /= row["num"]
        row["after"] /= row["num"]
    return table
