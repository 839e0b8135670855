"""The agent and its parts without training: solve one question, serve the tools, run one file in the sandbox."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from configs.errors import UserError, printable
from configs.run import RunConfig
from configs.wording import reason
from envs.sandbox import Sandbox
from envs.tools.toolbox import Toolbox
from envs.types import Task, ToolUnavailableError
from ray_jobs.phases.local import open_worker
from rollout.codec import trajectory_line
from rollout.records import append_line
from rollout.types import StopReason, Trajectory, Turn, is_answer

if TYPE_CHECKING:
    from envs.mcp_server import Transport


def run_serve_tools(config: RunConfig, *, transport: "Transport", host: str, port: int) -> None:
    """Returns when the client hangs up (stdio), with every session and sandbox ended; so they are as well when the
    command is told to end."""
    from envs.mcp_server import serve

    with Toolbox(config.envs) as toolbox:
        if toolbox.sandbox and toolbox.sandbox.without:
            print(f"agentflow: code sandbox: {toolbox.sandbox}", file=sys.stderr)
        asyncio.run(serve(toolbox, transport=transport, host=host, port=port))


class CodeFileError(UserError):
    """The file to run cannot be read; the message says why."""


def run_code(path: str, timeout_s: float = 5.0) -> int:
    """Prints what the code says, and the walls around it on stderr. 0 if it ended without an error, else 1. Raises
    CodeFileError and SandboxRefusedError."""
    try:
        code = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CodeFileError(f"'{path}' cannot be read: {reason(error)}; name a Python file in UTF-8") from error
    try:
        with Sandbox() as sandbox:
            print(f"code sandbox: {sandbox.state}", file=sys.stderr)
            result = sandbox.run(code, timeout_s=timeout_s)
    except ToolUnavailableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(result.text, end="" if result.text.endswith("\n") else "\n")
    if result.error:
        print(f"error: {result.error}", file=sys.stderr)
    return 1 if result.error else 0


_WHY: Mapping[StopReason, str] = {
    "answered": "the answer was empty",
    "verified": "the answer was empty",
    "format": "the replies were malformed, or the last step was no answer",
    "context": "the context is full; raise rollout.engine.max_model_len, or ask for fewer steps with agent.max_steps",
    "infrastructure": "the engine or a tool failed, or it took longer than rollout.episode_timeout_s",
}
"""A trajectory without an answer, by what ended it."""


class TraceError(UserError):
    """The trace could not be written; the message says why."""


def run_solve(config: RunConfig, question: str, adapter: Path | None, trace: Path | None) -> int:
    """`trace` gets one more line, in the format of a run's trajectories.jsonl; there is no gold answer, so no reward.
    Returns the exit code: 0 where there is an answer, else 1. Raises what `open_worker` raises, and TraceError."""
    console = Console()
    task = Task(id="question", dataset="question", question=question, answer="")
    with console.status("loading the engine"), open_worker(config, adapter) as worker:

        def show(turn: Turn) -> None:
            if turn.format_error:
                console.print(f"[red]malformed[/red]: {_plain(turn.format_error)}")
            elif turn.tool_call and turn.tool_result:
                console.print(
                    f"[bold]{_plain(turn.tool_call.name)}[/bold] {_plain(turn.tool_call.arguments)}  "
                    f"[dim]{_plain(turn.thought)}[/dim]\n  -> {_plain(turn.tool_result.text)}"
                )

        attempt = worker.attempt(task, task.id, group_id="solve", temperature=0.0, seed=config.seed, on_turn=show)
        trajectory = asyncio.run(attempt)
    if trace is not None:
        _append(trace, trajectory)
    if not is_answer(trajectory.answer):
        console.print(f"no answer: {_plain(trajectory.failure or _WHY[trajectory.stop_reason])}")
        return 1
    console.print(f"[bold green]answer[/bold green] {_plain(trajectory.answer)}")
    return 0


def _plain(text: str) -> str:
    """What a model or a tool wrote, which neither styles the console nor commands the terminal."""
    return escape(printable(text))


def _append(trace: Path, trajectory: Trajectory) -> None:
    try:
        trajectory.phase = "solve"
        append_line(trace, trajectory_line(trajectory))
    except OSError as error:
        raise TraceError(f"--trace '{trace}' cannot be written: {error.strerror}; name another file") from error
