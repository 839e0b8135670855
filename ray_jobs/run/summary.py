"""The summary of a run: the measured rates, their comparison, and the work that was done."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ray_jobs.run.console import duration, print_plain
from ray_jobs.statistics import counted, wilson_interval
from ray_jobs.viewer.pages import Rate, percent, points
from rollout.files import read_json

if TYPE_CHECKING:
    # Readers of a summary need neither of them, and they import much.
    from ray_jobs.evaluation import Evaluation
    from ray_jobs.run.run import Run

POLICIES = {"eval_untouched": "untouched model", "eval_before": "before RL", "eval_after": "after RL"}
"""Names of the evaluated policies by phase."""


def held_out_rates(summary: Mapping[str, Any]) -> list[Rate]:
    """Return the measured rates in summary.json, in the order of POLICIES."""
    rates = []
    for phase, label in POLICIES.items():
        policy = phase.removeprefix("eval_")
        rate = summary.get(f"solve_rate_{policy}")
        count = summary.get("num_untouched_tasks" if policy == "untouched" else "num_eval_tasks")
        if rate is not None and count:
            interval, note = wilson_interval(round(rate * count), count), counted(count, "task")
            step = {"before": 0, "after": summary.get("num_steps")}.get(policy)
            rates.append(Rate(label=label, rate=rate, interval=interval, kind=policy, note=note, step=step))
    return rates


def summarize(
    run: "Run",
    *,
    untouched: "Evaluation",
    before: "Evaluation",
    after: "Evaluation",
    cold_start: Mapping[str, object],
    training: Mapping[str, Any],
) -> dict[str, object]:
    """Return the content of summary.json, from the evaluations and the facts of cold start and RL phase.

    The policies before and after RL are compared on the tasks that both have scored.
    """
    phases = {"start": run.console.phase_seconds["start"]}
    phases |= {name: phase["seconds"] for name, phase in run.folder.finished_phases.items()}
    train_wall_s = phases["reinforce"]
    means = mean_scores(before, after)
    return {
        "solve_rate_untouched": fmean(untouched.solved.values()) if untouched.solved else None,
        "num_untouched_tasks": len(untouched.solved),
        **_compared(before, after),
        "by_dataset": _by_dataset(before, after, run.config.envs.mix),
        "wall_s": sum(phases.values()),
        "train_wall_s": train_wall_s,
        "phases": phases,
        "trajectories_per_s": training["num_trajectories"] / train_wall_s,
        **training,
        "cold_start": {**cold_start, "wall_s": phases["cold_start"]},
        "seed": run.config.seed,
        **({"mean_scores": means} if means else {}),
        **({"prm": read_json(run.folder.quality)} if run.folder.quality.exists() else {}),
    }


def _compared(before: "Evaluation", after: "Evaluation") -> dict[str, object]:
    comparison = before.compared_with(after)
    left_out = list(dict.fromkeys([*before.unscored, *after.unscored]))
    verdict = comparison.verdict if comparison else "not measured"
    if left_out:
        verdict += f"; {counted(len(left_out), 'task')} left out: unscored before or after RL"
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
    second = {item.key: item.score for item in after.items}
    pairs = [(item.score, second.get(item.key)) for item in before.items]
    scores = [(one, two) for one, two in pairs if one is not None and two is not None]
    if not any(0 < score < 1 for pair in scores for score in pair):
        return {}
    return {"before": fmean(one for one, _ in scores), "after": fmean(two for _, two in scores)}


def _by_dataset(before: "Evaluation", after: "Evaluation", mix: Mapping[str, float]) -> dict[str, dict[str, object]]:
    return {
        name: {
            "num": compared.num_tasks,
            "before": compared.before,
            "after": compared.after,
            "gain_ci95": list(compared.ci95),
            "mcnemar_p": compared.p,
            "trained": mix.get(name, 0.0) > 0,
        }
        for name in dict.fromkeys(item.dataset for item in before.items)
        if (compared := before.compared_with(after, dataset=name))
    }


def print_summary(summary: Mapping[str, Any], report: Path) -> None:
    """Print solve rates, the verdict, the work done, and the next commands."""
    console = Console()
    table = Table("policy", "solved", "95% interval", "of", title="Held-out tasks solved", title_justify="left")
    for rate in held_out_rates(summary):
        table.add_row(rate.label, percent(rate.rate), f"{points(rate.interval)}%", rate.note)
    console.print(table)
    if means := summary.get("mean_scores"):
        scores = ", ".join(f"{value:.3f} {name} RL" for name, value in means.items())
        print_plain(console, f"mean score: {scores}; solved is a score of 1")
    print_plain(console, f"after RL against before: {summary['verdict']}")
    groups, staleness = summary["groups"], summary["staleness"]
    counts = ", ".join(f"{groups[kind]} {kind}" for kind in ("trained", "refused", "filtered", "failed"))
    print_plain(
        console,
        f"{summary['num_steps']} train steps; {summary['num_trajectories']} trajectories "
        f"({summary['trajectories_per_s']:.2f}/s); groups {counts}; staleness {staleness['mean']:.2f} mean, "
        f"{staleness['max']:.0f} max; {duration(summary['wall_s'])} in all",
    )
    print_plain(console, f"speed: {summary['bottleneck'] or 'not measured'}")
    print_plain(console, f"report: {report}")
    folder, recipe = (shlex.quote(str(path)) for path in (report.parent, report.parent / "config.json"))
    print_plain(console, f"show the reasons of every advantage: agentflow view {folder}")
    print_plain(console, f"ask the trained agent: agentflow solve QUESTION {recipe} --adapter {folder}")
