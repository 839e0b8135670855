"""The summary of a run: its numbers, and how they are printed at its end."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.table import Table

from ray_jobs.run.console import duration, print_plain
from ray_jobs.statistics import PairedComparison, wilson_interval
from ray_jobs.viewer.render import percent, points
from rollout.codec import read_trajectories
from rollout.filters import SOLVED

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


def print_summary(summary: Mapping[str, Any], report: Path, output: RichConsole | None = None) -> None:
    """Print solve rates, the verdict, the work done, and the next commands."""
    console = output or RichConsole()
    table = Table(title="Held-out tasks solved", title_justify="left")
    for column in ("policy", "solved", "95% interval", "tasks"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    measured = {f"eval_{one.policy}": one for one in held_out_rates(summary)}
    for phase, policy in POLICIES.items():
        table.add_row(policy, *_rate_cells(measured.get(phase), _planned(summary, phase)))
    console.print(table)
    if means := summary.get("mean_scores"):
        said = ", ".join(f"{value:.3f} {name} RL" for name, value in means.items())
        print_plain(console, f"mean score: {said}; solved is a score of 1")
    print_plain(console, f"after RL against before: {summary.get('verdict', 'not measured')}")
    print_plain(console, _work_line(summary))
    if limit := summary.get("bottleneck"):
        print_plain(console, f"speed: {limit}")
    print_plain(console, f"report: {report}")
    for command, does in next_commands(report.parent):
        print_plain(console, f"{does}: {command}")


def _rate_cells(measured: HeldOut | None, planned: int) -> tuple[str, str, str]:
    if measured is None:
        return "not measured", "", f"0 of {planned}" if planned else "0"
    return percent(measured.rate), f"{points((measured.low, measured.high))}%", str(measured.num_tasks)


def _planned(summary: Mapping[str, Any], phase: str) -> int:
    """Tasks that a policy was asked, also those that could not be scored; how many the untouched model was is not
    written down."""
    if phase == "eval_untouched":
        return int(summary.get("num_untouched_tasks", 0))
    return int(summary.get("num_eval_tasks", 0)) + len(summary.get("left_out_eval_tasks", ()))


def _work_line(summary: Mapping[str, Any]) -> str:
    groups, staleness = summary.get("groups", {}), summary.get("staleness", {})
    kinds = ("trained", *(("refused",) if groups.get("refused") else ()), "filtered", "failed")
    counts = ", ".join(f"{groups[kind]} {kind}" for kind in kinds if kind in groups)
    parts = [f"{summary.get('num_steps', '?')} train steps", f"{summary.get('num_trajectories', '?')} trajectories"]
    if "trajectories_per_s" in summary:
        parts[-1] += f" ({summary['trajectories_per_s']:.2f}/s)"
    if counts:
        parts.append(f"groups {counts}")
    if staleness:
        parts.append(f"staleness {staleness['mean']:.2f} mean, {staleness['max']:.0f} max")
    if "wall_s" in summary:
        parts.append(f"{duration(summary['wall_s'])} in all")
    return "; ".join(parts)


def next_commands(run: Path) -> list[tuple[str, str]]:
    """Each with what it does; one is left out where the folder lacks what it needs."""
    folder = shlex.quote(str(run))
    commands = [(f"agentflow view {folder}", "why each step got its advantage")]
    question = _solved_question(run / "trajectories.jsonl")
    if question:
        policy = ["--recipe", str(run / "config.json"), "--adapter", str(run)]
        # Behind the options, after --, a question may begin with a dash.
        words = [*policy, "--", question] if question.startswith("-") else [question, *policy]
        commands.append((shlex.join(["agentflow", "solve", *words]), "ask the trained planner"))
    return commands


def _solved_question(trajectories: Path) -> str | None:
    """The first held-out question that the trained planner solved."""
    if not trajectories.exists():
        return None
    solved = (
        one.task.question
        for one in read_trajectories(trajectories)
        if one.phase == "eval_after" and one.outcome == SOLVED
    )
    return next(solved, None)
