"""The summary of a run: the numbers a reader is asked to believe, and where they come from."""

import json
from collections.abc import Mapping
from typing import Any

from ray_jobs.phases import Evaluation
from ray_jobs.run import Run
from reward.paired import compare_paired


def summarize(
    run: Run,
    *,
    untouched: Evaluation,
    before: Evaluation,
    after: Evaluation,
    cold_start: Mapping[str, Any],
    training: Mapping[str, Any],
) -> dict[str, Any]:
    """Before is the cold-started policy, after the RL-trained one, on the same tasks."""
    comparison = compare_paired(before.right, after.right)
    phases = {name: phase["seconds"] for name, phase in run.folder.finished_phases.items()}
    phases = {"start": run.console.phase_seconds["start"], **phases}
    train_wall_s = phases["reinforce"]
    facts = dict(training)
    sampled, packed, learner_s = (facts.pop(name) for name in ("sampled_tokens", "packed_tokens", "learner_s"))
    summary = {
        "solve_rate_untouched": _rate(untouched.right),
        "num_untouched_tasks": len(untouched.right),
        "solve_rate_before": _rate(before.right),
        "solve_rate_after": _rate(after.right),
        "num_eval_tasks": len(after.right),
        "solve_rate_gain_ci95": list(comparison.ci95),
        "mcnemar_p": comparison.p,
        "verdict": comparison.verdict,
        "by_dataset": _by_dataset(before, after, run.config.envs.mix),
        "wall_s": sum(phases.values()),
        "train_wall_s": train_wall_s,
        "phases": phases,
        "trajectories_per_s": facts["num_trajectories"] / train_wall_s,
        "rollout_tokens_per_s": sampled / train_wall_s,
        "learner_tokens_per_s": packed / max(learner_s, 1e-9),
        **facts,
        "cold_start": {**cold_start, "wall_s": phases["cold_start"]},
        "pipeline_depth": run.config.pipeline_depth,
        "credit": run.config.reward.credit,
        "seed": run.config.seed,
    }
    if run.folder.quality.exists():
        summary["prm"] = json.loads(run.folder.quality.read_text())
    return summary


def _rate(right: list[bool]) -> float | None:
    return sum(right) / len(right) if right else None


def _by_dataset(before: Evaluation, after: Evaluation, mix: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """`trained` is whether training drew from the data set too."""
    pairs: dict[str, list[tuple[bool, bool]]] = {}
    for trajectory, was_right, is_right in zip(before.trajectories, before.right, after.right, strict=True):
        pairs.setdefault(trajectory.task.dataset, []).append((was_right, is_right))
    table = {}
    for name, results in pairs.items():
        comparison = compare_paired(*zip(*results, strict=True))
        table[name] = {
            "num": comparison.num_tasks,
            "before": comparison.before,
            "after": comparison.after,
            "gain_ci95": list(comparison.ci95),
            "mcnemar_p": comparison.p,
            "trained": mix.get(name, 0.0) > 0,
        }
    return table
