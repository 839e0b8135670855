"""The summary of a run: the numbers a reader is asked to believe, and where they come from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ray_jobs.statistics import PairedComparison, wilson_interval

if TYPE_CHECKING:
    # They bring torch and Ray, and whoever reads a summary needs neither.
    from ray_jobs.held_out import Evaluation
    from ray_jobs.run.run import Run

POLICIES = {"eval_untouched": "untouched model", "eval_before": "before RL", "eval_after": "after RL"}
"""What the policies that are evaluated are called, by phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A solve rate over `num_tasks` with its 95% Wilson interval, all between 0 and 1; `step` counts the train steps
    before it, None where they are not known, and for the untouched model."""

    policy: str
    step: int | None
    num_tasks: int
    rate: float
    low: float
    high: float


def held_out_rates(summary: Mapping[str, Any]) -> list[HeldOut]:
    """Of a run's summary.json, those of POLICIES that were measured, in their order."""
    steps = {"before": 0, "after": summary.get("num_steps")}
    found = []
    for policy in (phase.removeprefix("eval_") for phase in POLICIES):
        rate = summary.get(f"solve_rate_{policy}")
        count = summary.get("num_untouched_tasks" if policy == "untouched" else "num_eval_tasks")
        if rate is not None and count:
            low, high = wilson_interval(round(rate * count), count)
            step = steps.get(policy)
            found.append(HeldOut(policy=policy, step=step, num_tasks=count, rate=rate, low=low, high=high))
    return found


def rates_by_step(summary: Mapping[str, Any]) -> list[tuple[int, HeldOut]]:
    """Those of `held_out_rates` that belong to a train step, which is the first of each pair."""
    return [(one.step, one) for one in held_out_rates(summary) if one.step is not None]


def summarize(
    run: "Run",
    *,
    untouched: "Evaluation",
    before: "Evaluation",
    after: "Evaluation",
    cold_start: Mapping[str, object],
    training: Mapping[str, Any],
) -> dict[str, object]:
    """Before is the policy that RL begins with, after the trained one, on the tasks that both could be scored on."""
    phases = {name: phase["seconds"] for name, phase in run.folder.finished_phases.items()}
    phases = {"start": run.console.phase_seconds["start"], **phases}
    summary = {
        "solve_rate_untouched": fmean(untouched.solved.values()) if untouched.solved else None,
        "num_untouched_tasks": len(untouched.solved),
        **_compared(before, after),
        "by_dataset": _by_dataset(before, after, run.config.envs.mix),
        **_work(phases, training),
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


def _compared(before: "Evaluation", after: "Evaluation") -> dict[str, object]:
    """None for what cannot be told where no task was scored in both."""
    comparison = before.compared_with(after)
    left_out = [str(key) for key in dict.fromkeys([*before.unscored, *after.unscored])]
    return {
        "solve_rate_before": comparison and comparison.before,
        "solve_rate_after": comparison and comparison.after,
        "num_eval_tasks": comparison.num_tasks if comparison else 0,
        "left_out_eval_tasks": left_out,
        "solve_rate_gain_ci95": comparison and list(comparison.ci95),
        "mcnemar_p": comparison and comparison.p,
        "verdict": _verdict(comparison, left_out),
    }


def _work(phases: Mapping[str, float], training: Mapping[str, Any]) -> dict[str, object]:
    """What was done, in how many seconds: `phases` by name, `training` the facts of the RL phase."""
    facts, train_wall_s = dict(training), phases["reinforce"]
    sampled, packed, learner_s = (facts.pop(name) for name in ("sampled_tokens", "packed_tokens", "learner_s"))
    return {
        "wall_s": sum(phases.values()),
        "train_wall_s": train_wall_s,
        "phases": phases,
        "trajectories_per_s": facts["num_trajectories"] / train_wall_s,
        "rollout_tokens_per_s": sampled / train_wall_s,
        "learner_tokens_per_s": packed / max(learner_s, 1e-9),
        **facts,
    }


def _verdict(comparison: PairedComparison | None, left_out: Sequence[str]) -> str:
    said = comparison.verdict if comparison else "not measured"
    if not left_out:
        return said
    return f"{said}; {len(left_out)} tasks are left out, which could not be scored before, after or in both"


def mean_scores(before: "Evaluation", after: "Evaluation") -> dict[str, float]:
    """What a scorer of one's own gave on average, where it gave something between 0 and 1; such a task is not solved.
    Of the tasks that both could be scored on, as everything that is compared."""
    first, second = ({item.key: item.score for item in one.items if item.score is not None} for one in (before, after))
    both = [key for key in first if key in second]
    if not any(0 < side[key] < 1 for side in (first, second) for key in both):
        return {}
    return {name: fmean(side[key] for key in both) for name, side in (("before", first), ("after", second))}


def _by_dataset(before: "Evaluation", after: "Evaluation", mix: Mapping[str, float]) -> dict[str, dict[str, object]]:
    """`trained` is whether training drew from the data set too. Without those of which no task was scored in both."""
    names = dict.fromkeys(item.key.benchmark for item in before.items)
    found = {name: before.compared_with(after, dataset=name) for name in names}
    return {
        name: {
            "num": one.num_tasks,
            "before": one.before,
            "after": one.after,
            "gain_ci95": list(one.ci95),
            "mcnemar_p": one.p,
            "trained": mix.get(name, 0.0) > 0,
        }
        for name, one in found.items()
        if one
    }
