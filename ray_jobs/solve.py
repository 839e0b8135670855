"""The agent and its tools without training: solve one question, and serve the tools."""

import asyncio
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from configs.errors import UserError, printable
from configs.run import RunConfig
from envs.tools.closing import until_closed
from envs.tools.toolbox import Toolbox
from envs.types import Task
from ray_jobs.run.local import open_worker
from rollout.codec import trajectory_line
from rollout.files import append_line
from rollout.types import Turn, is_answer

_REASONS = {
    "format": "the replies were malformed, or the last step was no answer",
    "context": "the context is full; raise rollout.engine.max_model_len, or lower agent.max_steps",
    "calls": "the agent made as many model calls as rollout.max_calls allows",
    "infrastructure": "the engine or a tool failed",
}


def run_solve(config: RunConfig, question: str, adapter: Path | None, trace: Path | None) -> int:
    """Solve one question and print its steps. Return 0 if there is an answer, else 1.

    `trace` gets one line in the format of a run's trajectories.jsonl, without a reward because there is no reference.
    """
    if not question.strip():
        raise UserError("the question is empty; write it out: agentflow solve 'What is 6*7?'")
    console = Console()
    task = Task(id="question", dataset="question", question=question, answer="")

    def plain(text: str) -> str:
        # What a model or a tool wrote must neither style the console nor control the terminal.
        return escape(printable(text))

    def show(turn: Turn) -> None:
        if turn.format_error:
            console.print(f"[red]malformed[/red]: {plain(turn.format_error)}")
        elif turn.tool_call and turn.tool_result:
            console.print(
                f"[bold]{plain(turn.tool_call.name)}[/bold] {plain(turn.tool_call.arguments)}  "
                f"[dim]{plain(turn.thought)}[/dim]\n  -> {plain(turn.tool_result.text)}"
            )

    with console.status("loading the engine"), open_worker(config, adapter) as worker:
        attempt = worker.attempt(task, task.id, group_id="solve", temperature=0.0, seed=config.seed, on_turn=show)
        trajectory = asyncio.run(until_closed(attempt))
    if trace is not None:
        trajectory.phase = "solve"
        append_line(trace, trajectory_line(trajectory))
    if not is_answer(trajectory.answer):
        why = trajectory.failure or _REASONS.get(trajectory.stop_reason, "the answer was empty")
        console.print(f"no answer: {plain(why)}")
        return 1
    console.print(f"[bold green]answer[/bold green] {plain(trajectory.answer)}")
    return 0


def run_serve_tools(config: RunConfig) -> None:
    """Serve the tools over MCP until the client disconnects or the process is interrupted."""
    from envs.mcp_server import serve

    with Toolbox(config.envs) as toolbox:
        if toolbox.sandbox and toolbox.sandbox.without:
            print(f"agentflow: code sandbox: {toolbox.sandbox}", file=sys.stderr)
        asyncio.run(until_closed(serve(toolbox)))
