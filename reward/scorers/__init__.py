"""Scorers: 1.0 for a right final answer, 0.0 for any other; custom scorers may return values in between.

The text comes from a policy that is rewarded for fooling them: no built-in scorer evaluates it, raises on it, or takes
more than linear time. The maths scorer is the exception: its library runs in a process that is killed after a limit. A
malformed reference is the data set's fault and raises.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence

from configs.errors import did_you_mean
from configs.plugins import OwnCodeError
from envs.datasets.families import FAMILIES
from envs.types import Task
from reward.scorers.custom import own_score
from reward.scorers.math import is_solution, score_math
from reward.scorers.notation import read_number
from reward.scorers.process import ScoringError
from reward.scorers.text import exact_match, score_choice, score_gaia, token_f1
from rollout.types import Trajectory, Turn, is_answer

SHORT_ANSWERS = ("bamboogle", "2wiki", "hotpotqa", "musique")

_MAX_CHARS = 64
_INTEGER = re.compile(r"[+-]?(?:[0-9]{1,32}|[0-9]{1,3}(?:,[0-9]{3}){1,8})")


def score_integer(text: str, gold: str) -> float:
    """Compare a plain number with an integer: it is read, never computed. Raise ValueError for another reference."""
    if not _INTEGER.fullmatch(gold):
        raise ValueError(f"the reference answer must be an integer, got {gold!r}")
    return float(len(text) <= _MAX_CHARS and read_number(text) == int(gold.replace(",", "")))


def score_game24(text: str, gold: str) -> float:
    """Check an expression over exactly the numbers in `gold` with + - * / and brackets whose exact value is 24."""
    return float(is_solution(text, [int(number) for number in gold.split()]))


def score_answer(task: Task, answer: str | None, turns: Sequence[Turn] = ()) -> float | None:
    """Return the score of an answer, or None if a custom scorer cannot decide; a missing or blank answer scores 0.

    Raises OwnCodeError if a custom scorer cannot be loaded, and ScoringError if it fails.
    """
    name = task.scorer
    if name is not None and ":" in name:
        return own_score(task, answer, turns) if is_answer(answer) else 0.0
    if name is not None and name not in NAMED:
        raise OwnCodeError(
            f"unknown scorer '{name}' of task '{task.id}'; use {', '.join(NAMED)}, or module:name"
            f"{did_you_mean(name, NAMED)}"
        )
    compare = _SCORERS[task.dataset] if name is None else NAMED[name]
    return compare(answer, task.answer) if is_answer(answer) else 0.0


def outcome_of(trajectory: Trajectory) -> float | None:
    """Return the raw score; None where the infrastructure failed, or the scorer fails, which the trajectory notes.

    Raises OwnCodeError if a custom scorer cannot be loaded.
    """
    if trajectory.stop_reason == "infrastructure":
        return None
    try:
        return score_answer(trajectory.task, trajectory.answer, trajectory.turns)
    except ScoringError as error:
        trajectory.failure = str(error)
        return None


async def outcomes_of(trajectories: Iterable[Trajectory]) -> list[float | None]:
    """Return raw scores, computed in threads: a slow scorer must not hold up other work of the event loop."""
    return await asyncio.gather(*(asyncio.to_thread(outcome_of, one) for one in trajectories))


def partial_credit(task: Task, answer: str | None) -> float | None:
    """Return the token F1 of a short answer; None for data sets whose answers are right or wrong."""
    if task.dataset not in SHORT_ANSWERS:
        return None
    return token_f1(answer, task.answer) if is_answer(answer) else 0.0


NAMED: dict[str, Callable[[str, str], float]] = {
    "text": exact_match,
    "integer": score_integer,
    "math": score_math,
    "choice": score_choice,
}
"""The comparisons that a task can name."""

_SCORERS: dict[str, Callable[[str, str], float]] = {
    **dict.fromkeys((*FAMILIES, "aime", "aime24"), score_integer),
    "game24": score_game24,
    "amc23": score_math,
    "gaia": score_gaia,
    "gpqa": score_choice,
    "medqa": score_choice,
    **dict.fromkeys(SHORT_ANSWERS, exact_match),
}
