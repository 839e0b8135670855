"""The summary of a run: the numbers a reader is asked to believe, and where they come from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from reward.paired import compare_paired, wilson_interval

if TYPE_CHECKING:
    # They bring torch and Ray, and whoever reads a summary needs neither.
    from ray_jobs.phases.cold_start import Evaluation
    from ray_jobs.run.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A solve rate with its 95% Wilson interval, all between 0 and 1; `step` counts the train steps before it."""

    policy: str
    step: int
    rate: float
    low: float
    high: float


def held_out_rates(summary: Mapping[str, Any]) -> list[HeldOut]:
    """Of a run's summary.json, before the first and after the last train step; none while they are not known."""
    count, last = summary.get("num_eval_tasks"), summary.get("num_steps")
    found = []
    for policy, step in (("before", 0), ("after", last)):
        rate = summary.get(f"solve_rate_{policy}")
        if count and step is not None and rate is not None:
            low, high = wilson_interval(round(rate * count), count)
            found.append(HeldOut(policy=policy, step=step, rate=rate, low=low, high=high))
    return found


def summarize(
    run: "Run",
    *,
    untouched: "Evaluation",
    before: "Evaluation",
    after: "Evaluation",
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
        "credit": run.config.reward.credit.type,
        "seed": run.config.seed,
    }
    if means := mean_scores(before, after):
        summary["mean_scores"] = means
    if run.folder.quality.exists():
        summary["prm"] = json.loads(run.folder.quality.read_text())
    return summary


def mean_scores(before: "Evaluation", after: "Evaluation") -> dict[str, float]:
    """What a scorer of one's own gave on average, where it gave something between 0 and 1; such a task is not solved,
    and one without a score is left out."""
    scores = {
        name: [reward for reward in evaluation.rewards if reward is not None]
        for name, evaluation in (("before", before), ("after", after))
    }
    if not any(0 < score < 1 for found in scores.values() for score in found):
        return {}
    return {name: fmean(found) for name, found in scores.items() if found}


def _rate(right: list[bool]) -> float | None:
    return sum(right) / len(right) if right else None


def _by_dataset(before: "Evaluation", after: "Evaluation", mix: Mapping[str, float]) -> dict[str, dict[str, Any]]:
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
