"""What a person sees while a run goes on, and at its end."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

_TITLES = {
    "start": "start engine and learner",
    "eval_untouched": "evaluate the untouched model",
    "cold_start": "cold start on demonstrations",
    "eval_before": "evaluate before RL",
    "reinforce": "reinforce",
    "eval_after": "evaluate after RL",
}


class PhaseProgress:
    """Progress of one phase: a bar on a terminal, a line per advance elsewhere."""

    def __init__(self, console: RichConsole, title: str, total: int | None) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._done = 0
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[shown]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=total, shown="")

    def advance(self, num: int = 1, **fields: float) -> None:
        self._done += num
        shown = "  ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in fields.items())
        self._bar.update(self._task, advance=num, shown=shown)
        if not self._console.is_terminal:
            self._console.print(f"  {self._title} {self._done}/{self._total}  {shown}", highlight=False)

    def start(self) -> None:
        if not self._console.is_terminal:
            self._console.print(f"{self._title} ...", highlight=False)
        self._bar.start()

    def stop(self) -> None:
        self._bar.stop()


class Console:
    """Phases with their wall time."""

    def __init__(self) -> None:
        self._console = RichConsole()
        self.phase_seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[PhaseProgress]:
        progress = PhaseProgress(self._console, _TITLES.get(name, name), total)
        started = time.perf_counter()
        progress.start()
        try:
            yield progress
        finally:
            progress.stop()
            self.phase_seconds[name] = time.perf_counter() - started

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False)


def print_summary(summary: Mapping[str, Any], report: Path) -> None:
    """The numbers to remember, the honest verdict, and where to read on."""
    console = RichConsole()
    table = Table(title="Held-out tasks solved", title_justify="left")
    for column in ("policy", "solved", "tasks"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    rows = (
        ("untouched model", summary["solve_rate_untouched"], summary["num_untouched_tasks"]),
        ("cold-started", summary["solve_rate_before"], summary["num_eval_tasks"]),
        ("after RL", summary["solve_rate_after"], summary["num_eval_tasks"]),
    )
    for name, rate, count in rows:
        table.add_row(name, "not measured" if rate is None else f"{100 * rate:.1f}%", str(count))
    console.print(table)
    console.print(f"RL against cold start: {summary['verdict']}", highlight=False)
    groups, staleness = summary["groups"], summary["staleness"]
    console.print(
        f"{summary['num_steps']} train steps, {summary['num_trajectories']} trajectories "
        f"({summary['trajectories_per_s']:.2f}/s), groups {groups['trained']} trained, {groups['filtered']} "
        f"filtered, {groups['failed']} failed; staleness {staleness['mean']:.2f} mean, {staleness['max']:.0f} max; "
        f"{summary['wall_s']:.0f} s in all",
        highlight=False,
    )
    console.print(f"report: {report}", highlight=False)
