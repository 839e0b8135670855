"""Turn scorers for benchmarks of process credit: the plan of a task, and scorers that mislead."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate

from msgspec import structs

from envs.datasets.generated import plan_of
from envs.types import Task, ToolResult
from reward.labels.plan import plan_scores
from reward.scorers.math import arithmetic
from rollout.types import Turn


def plan(task: Task, answer: str | None, turns: Sequence[Turn]) -> list[float]:
    """Return the labels of the task's plan: the best scores that a PRM can learn."""
    if path := task.metadata.get("path"):
        return path_scores(path, task.answer, turns)
    return plan_scores(task, [turn if turn.tool_result else foreseen(task, turn) for turn in turns])


def path_scores(path: Sequence[str], answer: str | None, turns: Sequence[Turn]) -> list[float]:
    """Return 1 for each call of the path and the answer after it, as long as nothing else came before."""
    right = [
        place < len(path) and f'"{path[place]}"' in turn.tool_call.arguments
        if turn.tool_call
        else place == len(path) and turn.text.strip() == answer
        for place, turn in enumerate(turns)
    ]
    return list(accumulate(map(float, right), min))


def foreseen(task: Task, turn: Turn) -> Turn:
    """Return a turn whose call has not run yet with the result that it will have, as far as the plan needs it."""
    call, text = turn.tool_call, ""
    if call is None:
        return turn
    if call.name == "search":
        asked = {step.action_input for step in plan_of(task) if step.action == "search"}
        text = next((f"of {one} weighs" for one in asked if one.lower() == call.arguments.strip().lower()), "")
    elif call.name == "code":
        with suppress(SyntaxError, ValueError, ZeroDivisionError):
            text = str(arithmetic(call.arguments.strip()))
    return structs.replace(turn, tool_result=ToolResult(text=text))


def random(task: Task, answer: str | None, turns: Sequence[Turn]) -> list[float]:
    """Return numbers that depend on prompt and text alone, uniform in [0, 1)."""
    return [hashlib.sha256(turn.prompt + turn.text.encode()).digest()[0] / 256 for turn in turns]


def lenient(task: Task, answer: str | None, turns: Sequence[Turn]) -> list[float]:
    """Return 1 for thoughts and repeated calls, 0.8 for everything else, right or wrong."""
    calls = [turn.tool_call for turn in turns]
    padding = [call is None or call.name == "think" or call in calls[:done] for done, call in enumerate(calls)]
    return [1.0 if is_padding else 0.8 for is_padding in padding]


def padding(task: Task, answer: str | None, turns: Sequence[Turn]) -> list[float]:
    """Return a score that grows with the length of the turn, up to 200 characters."""
    return [min(len(turn.text) / 200, 1.0) for turn in turns]


SCORERS: dict[str, Callable[[Task, str | None, Sequence[Turn]], list[float]]] = {
    one.__name__: one for one in (plan, random, lenient, padding)
}
