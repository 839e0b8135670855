"""The report of a run: one page with the gain, the learning curve and the outcomes of the held-out tasks."""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.datasets.families import FAMILIES
from envs.sandbox import SandboxState
from ray_jobs.run.summary import POLICIES, held_out_rates, rates_by_step
from ray_jobs.statistics import wilson_interval
from ray_jobs.viewer.pages import Bar, LineChart, Mark, write_page
from rollout.codec import Record, flat_record, read_trajectories
from rollout.filters import SOLVED
from rollout.records import read_records
from rollout.types import is_answer

Row = Mapping[str, float]
FILES = ("summary.json", "config.json", "metrics.jsonl", "trajectories.jsonl")
"""Files of a run to which the report links."""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` from the files of a run folder, of which some may be missing. Raises OSError."""
    summary, config, provenance = (
        json.loads((run_dir / name).read_text(encoding="utf-8")) if (run_dir / name).exists() else {}
        for name in ("summary.json", "config.json", "provenance.json")
    )
    metrics = run_dir / "metrics.jsonl"
    rows = list(read_records(metrics)) if metrics.exists() else []
    marks = [
        Mark(label=f"held out, {at.policy} RL", step=step, rate=at.rate, interval=(at.low, at.high), kind=at.policy)
        for step, at in rates_by_step(summary)
    ]
    sandbox = provenance.get("sandbox")
    answer, kind = _answer(summary)
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
        charts=list(_charts(rows, marks)),
        bars=list(_bars(summary)),
        intervals={
            name: wilson_interval(round(row["after"] * row["num"]), row["num"])
            for name, row in summary.get("by_dataset", {}).items()
        },
        outcomes=list(_outcomes(run_dir / "trajectories.jsonl")),
        files=[file for file in FILES if (run_dir / file).exists()],
        sandbox=SandboxState(**sandbox) if sandbox else None,
    )


def _answer(summary: Mapping[str, Any]) -> tuple[str, str]:
    """Return whether RL improved the planner, and the class of the answer in style.css."""
    before, after, p = (summary.get(key) for key in ("solve_rate_before", "solve_rate_after", "mcnemar_p"))
    if before is None or after is None or p is None:
        return "That was not measured.", "unsure"
    if p >= 0.05:
        return "This run does not show it.", "unsure"
    return ("Yes.", "better") if after > before else ("No, it made it worse.", "unsure worse")


def _charts(rows: Sequence[Row], marks: Sequence[Mark]) -> Iterator[LineChart]:
    """Draw the learning curves: while sampling, by family, and on held-out tasks while training."""
    steps, rate = [row for row in rows if "policy/loss" in row], "held_out/solve_rate"
    sampled = {"rollout/solve_rate": "while sampling, all drawn groups"}
    yield _chart(steps, "Tasks solved, over train steps", sampled, marks=marks)
    families = {f"solved/{family}": family for family in FAMILIES if any(f"solved/{family}" in row for row in steps)}
    if len(families) > 1:
        yield _chart(steps, "The same by family, over its last 8 groups", families)
    held_out = [row for row in rows if rate in row]
    if held_out:
        whole = {rate: "some held-out tasks, greedily"}
        yield _chart(held_out, "Held-out tasks solved while training", whole, marks=marks)
    datasets = {key: key.removeprefix(f"{rate}/") for row in held_out for key in row if key.startswith(f"{rate}/")}
    if datasets:
        yield _chart(held_out, "The same by data set", datasets)


def _chart(steps: Sequence[Row], title: str, names: Mapping[str, str], *, marks: Sequence[Mark] = ()) -> LineChart:
    # Steps without any finite value are left out.
    rows = [row for row in steps if any(math.isfinite(row.get(key, math.nan)) for key in names)]
    ends = {
        name: [tuple(row.get(key.replace("solve_rate", end, 1), math.nan) for end in ("low", "high")) for row in rows]
        for key, name in names.items()
        if key.startswith("held_out/")
    }
    return LineChart(
        title=title,
        xs=[float(row["step"]) for row in rows],
        lines={name: [float(row.get(key, math.nan)) for row in rows] for key, name in names.items()},
        top=1.0,
        marks=marks,
        share=True,
        intervals={name: [(low, high) for low, high in pairs] for name, pairs in ends.items()},
    )


def _bars(summary: Mapping[str, Any]) -> Iterator[Bar]:
    for rate in held_out_rates(summary):
        of_all = rate.num_tasks == summary.get("num_eval_tasks")
        note = f"{rate.num_tasks} tasks" if of_all else f"{rate.num_tasks} of these tasks"
        label, interval = POLICIES[f"eval_{rate.policy}"], (rate.low, rate.high)
        yield Bar(label=label, note=note, rate=rate.rate, interval=interval, kind=rate.policy)


def _outcomes(trajectories: Path) -> Iterator[tuple[object, ...]]:
    """Count for each policy its tasks, right, wrong, missing and unscored answers, failed tool calls and mean turns.

    Wrong and missing answers have different causes.
    """
    attempts: dict[str, dict[str, Record]] = {phase: {} for phase in POLICIES}
    for trajectory in read_trajectories(trajectories) if trajectories.exists() else ():
        if trajectory.phase in attempts:
            attempts[trajectory.phase][trajectory.task.id] = flat_record(trajectory)
    for phase, by_task in attempts.items():
        records = list(by_task.values())
        if not records:
            continue
        turns = [turn for record in records for turn in record["turns"] if turn["role"] == "planner"]
        scored = [record for record in records if record["reward"] is not None]
        right = sum(record["reward"] == SOLVED for record in scored)
        silent = sum(not is_answer(record["answer"]) for record in scored)
        failed_calls = sum(turn["tool_error"] is not None for turn in turns)
        counts = (len(records), right, len(scored) - right - silent, silent, len(records) - len(scored), failed_calls)
        yield POLICIES[phase], *counts, f"{len(turns) / len(records):.1f}"
