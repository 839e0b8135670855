"""Evaluate one policy on held-out tasks."""

import asyncio
from pathlib import Path

from rich.console import Console
from rich.table import Table

from configs.run import RunConfig
from ray_jobs.phases import Evaluation, evaluation_tasks
from ray_jobs.single import open_worker
from reward.paired import wilson_interval


def run_evaluation(config: RunConfig, adapter: Path | None) -> None:
    """Greedy, every task in the denominator; prints the solve rate per data set with its 95% interval."""
    console = Console()
    tasks = evaluation_tasks(config)
    with console.status("loading the engine"), open_worker(config, adapter) as worker:
        trajectories = asyncio.run(worker.evaluate(tasks, "evaluate"))
    evaluation = Evaluation(phase="evaluate", trajectories=tuple(trajectories))
    table = Table(title=f"Solved by {adapter or 'the base model'}", title_justify="left")
    for column in ("data set", "solved", "tasks", "95% interval"):
        table.add_column(column)
    names = sorted({task.dataset for task in tasks})
    for name in [*names, "all"] if len(names) > 1 else names:
        right = [
            ok for one, ok in zip(trajectories, evaluation.right, strict=True) if name in ("all", one.task.dataset)
        ]
        low, high = wilson_interval(sum(right), len(right))
        rate = f"{100 * sum(right) / len(right):.1f}%"
        table.add_row(name, rate, str(len(right)), f"{100 * low:.1f} to {100 * high:.1f}%")
    console.print(table)
