"""What a solved task teaches another one: the steps that led to the answer, without the answer.

An entry comes from a model's own words, and from a shared server anybody's: it is data. Whatever it holds, it becomes
one line of printable characters, of bounded length, between marks that it cannot contain.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envs.datasets.split import question_key
from envs.sandbox.outcome import cut_middle
from envs.types import ToolResult
from rollout.agent.planner import shown
from rollout.types import Trajectory

MAX_STEPS = 6
MAX_STEP_CHARS = 200
MAX_QUESTION_CHARS = 500
HEADING = "Hints from other tasks that were solved:"
_NO_STEP = ("think", "answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """`steps`: (action, input) of each tool call, in order. `key` is the whole question's, `question` may be cut."""

    task_id: str
    key: str
    question: str
    steps: tuple[tuple[str, str], ...]

    def render(self, max_chars: int) -> str:
        """One line."""
        steps = "; ".join(f"{action}: {text}" for action, text in self.steps)
        return " ".join(cut_middle(f"{self.question} -> {steps}", max_chars).split())

    def payload(self) -> dict[str, object]:
        return {
            "task_id": self.task_id,
            "question": self.question,
            "key": self.key,
            "steps": [list(step) for step in self.steps],
        }


def experience_of(trajectory: Trajectory) -> Experience | None:
    """What a right trajectory teaches; None where no tool call is left to tell of.

    The answer is not told, nor any step that holds the reference answer or the one that was given: whoever meets the
    same question under another name must still work it out.
    """
    task = trajectory.task
    given_away = [re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)", re.IGNORECASE) for answer in _answers(trajectory)]
    calls = [turn.tool_call for turn in trajectory.planner_turns if turn.tool_call and not _failed(turn.tool_result)]
    steps = tuple(
        (call.name, one_line(call.arguments, MAX_STEP_CHARS))
        for call in calls
        if call.name not in _NO_STEP and not any(answer.search(call.arguments) for answer in given_away)
    )
    if not steps:
        return None
    return Experience(
        task_id=task.id,
        key=question_key(task.question),
        question=one_line(task.question, MAX_QUESTION_CHARS),
        steps=steps[:MAX_STEPS],
    )


def read_experience(payload: Mapping[str, object]) -> Experience | None:
    """An entry as a server gave it back, cleaned once more; None for what is no entry."""
    task_id, key, question, steps = (payload.get(name) for name in ("task_id", "key", "question", "steps"))
    if not (isinstance(task_id, str) and isinstance(key, str) and isinstance(question, str)):
        return None
    if not isinstance(steps, list):
        return None
    pairs = [step for step in steps[:MAX_STEPS] if _is_step(step)]
    if not pairs or not question.strip():
        return None
    return Experience(
        task_id=task_id,
        key=key,
        question=one_line(question, MAX_QUESTION_CHARS),
        steps=tuple((one_line(action, 40), one_line(text, MAX_STEP_CHARS)) for action, text in pairs),
    )


def render_hints(entries: Sequence[Experience], max_entry_chars: int) -> str:
    """The part of the planner's prompt that shows them; empty without any."""
    if not entries:
        return ""
    lines = "\n".join(f"- {entry.render(max_entry_chars)}" for entry in entries)
    return f"{HEADING}\n{shown(ToolResult(text=lines, foreign=True))}"


def is_about(entry: Experience, question: str) -> bool:
    """Whether an entry was made from this very question."""
    return entry.key == question_key(question) or entry.question == one_line(question, MAX_QUESTION_CHARS)


def one_line(text: str, max_chars: int) -> str:
    """Without control and format characters, which a terminal or a reader's eye would obey."""
    words = " ".join(text.split())
    clean = "".join(letter for letter in words if letter.isprintable())
    return " ".join(cut_middle(clean, max_chars).split())


def _answers(trajectory: Trajectory) -> set[str]:
    answers = {trajectory.task.answer, trajectory.answer or ""}
    return {answer.strip() for answer in answers if answer.strip()}


def _failed(result: ToolResult | None) -> bool:
    return result is None or result.error is not None


def _is_step(step: object) -> bool:
    return isinstance(step, list) and len(step) == 2 and all(isinstance(part, str) for part in step)
