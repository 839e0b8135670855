"""The summary of a run: the measured rates, their comparison, and the work that was done."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.table import Table

from configs.run import RunConfig
from ray_jobs.run.console import duration, print_plain
from ray_jobs.statistics import wilson_interval
from ray_jobs.viewer.pages import percent, points
from rollout.codec import read_trajectories
from rollout.filters import SOLVED

if TYPE_CHECKING:
    # Readers of a summary need neither of them, and they import much.
    from ray_jobs.evaluation import Evaluation
    from ray_jobs.run.folder import RunFolder

POLICIES = {"eval_untouched": "untouched model", "eval_before": "before RL", "eval_after": "after RL"}
"""Names of the evaluated policies by phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A solve rate on held-out tasks with its 95% Wilson interval, all in [0, 1]."""

    policy: str
    step: int | None
    """Train steps before it. None if unknown, and for the untouched model."""
    num_tasks: int
    rate: float
    low: float
    high: float


def held_out_rates(summary: Mapping[str, Any]) -> list[HeldOut]:
    """Return the measured rates in summary.json, in the order of POLICIES."""
    steps = {"before": 0, "after": summary.get("num_steps")}
    rates = []
    for policy in (phase.removeprefix("eval_") for phase in POLICIES):
        rate = summary.get(f"solve_rate_{policy}")
        count = summary.get("num_untouched_tasks" if policy == "untouched" else "num_eval_tasks")
        if rate is not None and count:
            low, high = wilson_interval(round(rate * count), count)
            step = steps.get(policy)
            rates.append(HeldOut(policy=policy, step=step, num_tasks=count, rate=rate, low=low, high=high))
    return rates


def rates_by_step(summary: Mapping[str, Any]) -> list[tuple[int, HeldOut]]:
    """Return the rates that belong to a train step, with that step."""
    return [(rate.step, rate) for rate in held_out_rates(summary) if rate.step is not None]


def summarize(
    config: RunConfig,
    folder: "RunFolder",
    *,
    start_s: float,
    untouched: "Evaluation",
    before: "Evaluation",
    after: "Evaluation",
    cold_start: Mapping[str, object],
    training: Mapping[str, Any],
) -> dict[str, object]:
    """Return the content of summary.json. `start_s` are the seconds of the start, `training` the facts of the RL phase.

    The policies before and after RL are compared on the tasks that both have scored.
    """
    phases = {"start": start_s} | {name: phase["seconds"] for name, phase in folder.finished_phases.items()}
    facts, train_wall_s = dict(training), phases["reinforce"]
    sampled, packed, learner_s = (facts.pop(name) for name in ("sampled_tokens", "packed_tokens", "learner_s"))
    summary = {
        "solve_rate_untouched": fmean(untouched.solved.values()) if untouched.solved else None,
        "num_untouched_tasks": len(untouched.solved),
        **_compared(before, after),
        "by_dataset": _by_dataset(before, after, config.envs.mix),
        "wall_s": sum(phases.values()),
        "train_wall_s": train_wall_s,
        "phases": phases,
        "trajectories_per_s": facts["num_trajectories"] / train_wall_s,
        "rollout_tokens_per_s": sampled / train_wall_s,
        "learner_tokens_per_s": packed / max(learner_s, 1e-9),
        **facts,
        "cold_start": {**cold_start, "wall_s": phases["cold_start"]},
        "pipeline_depth": config.pipeline_depth,
        "credit": config.reward.credit.type,
        "seed": config.seed,
    }
    if means := mean_scores(before, after):
        summary["mean_scores"] = means
    if folder.quality.exists():
        summary["prm"] = json.loads(folder.quality.read_text())
    return summary


def _compared(before: "Evaluation", after: "Evaluation") -> dict[str, object]:
    comparison = before.compared_with(after)
    left_out = list(dict.fromkeys([*before.unscored, *after.unscored]))
    verdict = comparison.verdict if comparison else "not measured"
    if left_out:
        verdict += f"; {len(left_out)} tasks are left out, because they are unscored before or after RL"
    return {
        "solve_rate_before": comparison and comparison.before,
        "solve_rate_after": comparison and comparison.after,
        "num_eval_tasks": comparison.num_tasks if comparison else 0,
        "left_out_eval_tasks": left_out,
        "solve_rate_gain_ci95": comparison and list(comparison.ci95),
        "mcnemar_p": comparison and comparison.p,
        "verdict": verdict,
    }


def mean_scores(before: "Evaluation", after: "Evaluation") -> dict[str, float]:
    """Return the mean scores on the tasks that both have scored, if a custom scorer gave a score between 0 and 1."""
    first, second = (
        {item.key: item.score for item in side.items if item.score is not None} for side in (before, after)
    )
    both = [key for key in first if key in second]
    if not any(0 < side[key] < 1 for side in (first, second) for key in both):
        return {}
    return {name: fmean(side[key] for key in both) for name, side in (("before", first), ("after", second))}


def _by_dataset(before: "Evaluation", after: "Evaluation", mix: Mapping[str, float]) -> dict[str, dict[str, object]]:
    rows: dict[str, dict[str, object]] = {}
    for name in dict.fromkeys(item.dataset for item in before.items):
        if compared := before.compared_with(after, dataset=name):
            rows[name] = {
                "num": compared.num_tasks,
                "before": compared.before,
                "after": compared.after,
                "gain_ci95": list(compared.ci95),
                "mcnemar_p": compared.p,
                "trained": mix.get(name, 0.0) > 0,
            }
    return rows


def print_summary(summary: Mapping[str, Any], report: Path, output: RichConsole | None = None) -> None:
    """Print solve rates, the verdict, the work done, and the next commands."""
    console = output or RichConsole()
    table = Table(title="Held-out tasks solved", title_justify="left")
    for column in ("policy", "solved", "95% interval", "tasks"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    measured = {f"eval_{rate.policy}": rate for rate in held_out_rates(summary)}
    for phase, policy in POLICIES.items():
        if rate := measured.get(phase):
            table.add_row(policy, percent(rate.rate), f"{points((rate.low, rate.high))}%", str(rate.num_tasks))
            continue
        # The tasks that a policy attempted. Unscored ones are not recorded for the untouched model.
        untouched = phase == "eval_untouched"
        planned = int(summary.get("num_untouched_tasks" if untouched else "num_eval_tasks", 0))
        planned += 0 if untouched else len(summary.get("left_out_eval_tasks", ()))
        table.add_row(policy, "not measured", "", f"0 of {planned}" if planned else "0")
    console.print(table)
    if means := summary.get("mean_scores"):
        scores = ", ".join(f"{value:.3f} {name} RL" for name, value in means.items())
        print_plain(console, f"mean score: {scores}; solved is a score of 1")
    print_plain(console, f"after RL against before: {summary.get('verdict', 'not measured')}")
    print_plain(console, _work_line(summary))
    if limit := summary.get("bottleneck"):
        print_plain(console, f"speed: {limit}")
    print_plain(console, f"report: {report}")
    for command, does in next_commands(report.parent):
        print_plain(console, f"{does}: {command}")


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
    """Return commands for a finished run, with their purpose."""
    folder = shlex.quote(str(run))
    commands = [(f"agentflow view {folder}", "show the reasons of every advantage")]
    question = _solved_question(run / "trajectories.jsonl")
    if question:
        policy = ["--recipe", str(run / "config.json"), "--adapter", str(run)]
        # A question that begins with a dash must follow --.
        words = [*policy, "--", question] if question.startswith("-") else [question, *policy]
        commands.append((shlex.join(["agentflow", "solve", *words]), "ask the trained planner"))
    return commands


def _solved_question(trajectories: Path) -> str | None:
    # The first held-out question that the trained planner solved.
    if not trajectories.exists():
        return None
    solved = (
        trajectory.task.question
        for trajectory in read_trajectories(trajectories)
        if trajectory.phase == "eval_after" and trajectory.outcome == SOLVED
    )
    return next(solved, None)
