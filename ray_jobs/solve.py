"""Solve one question and show each step as it happens."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from configs.run import RunConfig
from envs.types import Task
from ray_jobs.single import open_worker
from rollout.records import append_record, trajectory_record
from rollout.types import StopReason, Trajectory, Turn

_WHY: Mapping[StopReason, str] = {
    "answered": "the answer was empty",
    "verified": "the answer was empty",
    "format": "the replies were malformed, or the last step was no answer",
    "context": "the context is full; raise rollout.engine.max_model_len, or ask for fewer steps with rollout.max_steps",
    "infrastructure": "the engine or a tool failed, or it took longer than rollout.episode_timeout_s",
}
"""A trajectory without an answer, by what ended it."""


class TraceError(RuntimeError):
    """The trace could not be written; the message says why."""


def run_solve(config: RunConfig, question: str, adapter: Path | None, trace: Path | None) -> int:
    """`trace` gets one more line, in the format of a run's trajectories.jsonl; there is no gold answer, so no reward.
    Returns the exit code: 0 where there is an answer, else 1. Raises what `open_worker` raises, and TraceError."""
    console = Console()
    task = Task(id="question", dataset="question", question=question, answer="")
    with console.status("loading the engine"), open_worker(config, adapter) as worker:

        def show(turn: Turn) -> None:
            if turn.format_error:
                console.print(f"[red]malformed[/red]: {escape(turn.format_error)}")
            elif turn.tool_call and turn.tool_result:
                console.print(
                    f"[bold]{escape(turn.tool_call.name)}[/bold] {escape(turn.tool_call.arguments)}  "
                    f"[dim]{escape(turn.thought)}[/dim]\n  -> {escape(turn.tool_result.text)}"
                )

        trajectory = asyncio.run(worker.solve(task, show))
    if trace is not None:
        _append(trace, trajectory)
    if trajectory.answer is None:
        console.print(f"no answer: {_WHY[trajectory.stop_reason]}")
        return 1
    console.print(f"[bold green]answer[/bold green] {escape(trajectory.answer)}")
    return 0


def _append(trace: Path, trajectory: Trajectory) -> None:
    try:
        append_record(trace, trajectory_record(trajectory, reward=None, phase="solve", step=None))
    except OSError as error:
        raise TraceError(f"--trace '{trace}' cannot be written: {error.strerror}; name another file") from error
