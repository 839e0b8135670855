"""The report of a run: one page with the gain, the learning curve and the outcomes of the held-out tasks."""

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from envs.sandbox import SandboxState
from ray_jobs.run.summary import POLICIES, held_out_rates
from ray_jobs.statistics import wilson_interval
from ray_jobs.viewer.pages import LineChart, Point, Rate, answered, write_page
from rollout.codec import read_trajectories
from rollout.files import read_json, read_records
from rollout.filters import SOLVED
from rollout.types import Trajectory, is_answer

Row = Mapping[str, float]
FILES = ("summary.json", "config.json", "metrics.jsonl", "trajectories.jsonl")
_RATE = "held_out/solve_rate"


def write_report(run_dir: Path) -> Path:
    """Write `report.html` from the files of a finished run's folder. Raises OSError."""
    summary, config, provenance = (read_json(run_dir / f"{name}.json") for name in ("summary", "config", "provenance"))
    rates, sandbox = held_out_rates(summary), provenance.get("sandbox")
    before, after = (summary.get(f"solve_rate_{name}") for name in ("before", "after"))
    gain = None if before is None or after is None else after - before
    answer, kind = answered(gain, summary.get("mcnemar_p"))
    return write_page(
        run_dir / "report.html",
        "report",
        name=run_dir.name,
        folder=shlex.quote(str(run_dir)),
        summary=summary,
        config=config,
        provenance=provenance,
        answer=answer,
        kind=kind,
        charts=list(_charts(list(read_records(run_dir / "metrics.jsonl")), rates)),
        bars=rates,
        intervals={
            name: wilson_interval(round(row["after"] * row["num"]), row["num"])
            for name, row in summary.get("by_dataset", {}).items()
        },
        outcomes=list(_outcomes(read_trajectories(run_dir / "trajectories.jsonl"))),
        files=FILES,
        sandbox=SandboxState(**sandbox) if sandbox else None,
    )


def _charts(rows: Sequence[Row], rates: Sequence[Rate]) -> Iterator[LineChart]:
    """Draw the learning curves: of held-out tasks while training, while sampling, and by data set."""
    marks = [rate for rate in rates if rate.step is not None]
    sampled = {"while sampling": _points(rows, "rollout/solve_rate")}
    held_out = {"some held-out tasks, greedily": _points(rows, _RATE)}
    keys = {key for row in rows for key in row}

    def by_dataset(prefix: str) -> dict[str, list[Point]]:
        return {key.removeprefix(prefix): _points(rows, key) for key in keys if key.startswith(prefix)}

    for title, lines, diamonds, fewest in (
        ("Held-out tasks solved while training", held_out, marks, 1),
        ("The same by data set", by_dataset(f"{_RATE}/"), (), 1),
        ("Tasks solved while sampling", sampled, marks, 1),
        ("The same by data set, over its last 8 tasks", by_dataset("solved/"), (), 2),
    ):
        drawn = {name: points for name, points in sorted(lines.items()) if points}
        if len(drawn) >= fewest:
            yield LineChart(title=title, lines=drawn, marks=diamonds)


def _points(rows: Iterable[Row], key: str) -> list[Point]:
    """Return the finite values of a metric; a held-out rate has the interval that was logged with it."""
    ends = [key.replace("solve_rate", end, 1) if key.startswith(_RATE) else key for end in ("low", "high")]
    return [
        (row["step"], row[key], row.get(ends[0], row[key]), row.get(ends[1], row[key]))
        for row in rows
        if math.isfinite(row.get(key, math.nan))
    ]


def _outcomes(trajectories: Iterable[Trajectory]) -> Iterator[tuple[object, ...]]:
    """Count for each policy its tasks, right, wrong, missing and unscored answers, failed tool calls and mean turns."""
    attempts: dict[str, dict[str, Trajectory]] = {phase: {} for phase in POLICIES}
    for trajectory in trajectories:
        if trajectory.phase in attempts:
            attempts[trajectory.phase][trajectory.task.id] = trajectory
    for phase, by_task in attempts.items():
        if not by_task:
            continue
        turns = [turn for attempt in by_task.values() for turn in attempt.planner_turns]
        scored = [attempt for attempt in by_task.values() if attempt.total is not None]
        right = sum(attempt.total == SOLVED for attempt in scored)
        silent = sum(not is_answer(attempt.answer) for attempt in scored)
        failed_calls = sum(turn.tool_result is not None and turn.tool_result.error is not None for turn in turns)
        counts = (len(by_task), right, len(scored) - right - silent, silent, len(by_task) - len(scored), failed_calls)
        yield POLICIES[phase], *counts, f"{len(turns) / len(by_task):.1f}"
