"""Scorers of one's own: a function that a recipe or a task names, asked under a time limit and held to its word."""

import inspect
import math
import queue
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache

from configs.own import OwnCodeError, check_call, failure, load_own
from envs.types import Task
from rollout.types import Turn

Scorer = Callable[[Task, str, Sequence[Turn]], object]


def own_score(task: Task, answer: str, turns: Sequence[Turn]) -> float | None:
    """What the function that `task.scorer` names says of an answer: from 0 to 1, or None where it cannot tell.

    Raises OwnCodeError where it raises, takes too long, or returns anything else: such an answer is never a zero.
    """
    source = task.scorer or ""
    call = scorer_of(source)
    answers: queue.SimpleQueue[tuple[object, BaseException | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((call(task, answer, turns), None))
        except BaseException as error:
            answers.put((None, error))

    # Nothing can end a thread from outside; as a daemon it does not keep the process that gives up on it.
    threading.Thread(target=ask, daemon=True, name=source).start()
    try:
        score, error = answers.get(timeout=task.scoring_limit_s)
    except queue.Empty:
        raise OwnCodeError(
            f"scorer '{source}' gave no score for task '{task.id}' within {task.scoring_limit_s:g} s; make it faster, "
            "or raise reward.timeout_s"
        ) from None
    if error is not None:
        raise OwnCodeError(f"scorer '{source}' failed on task '{task.id}' with {failure(error)}") from error
    return _checked(score, source, task)


@lru_cache(maxsize=64)
def scorer_of(source: str) -> Scorer:
    """The function, as one of task, answer and turns. Raises OwnCodeError."""
    function = load_own(source, key="scorer")
    if _takes_turns(function):
        return function
    check_call(function, source, key="scorer", takes="task, answer")
    return lambda task, answer, turns: function(task, answer)


def _takes_turns(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind("task", "answer", "turns")
    except (TypeError, ValueError):
        return False
    return True


def _checked(score: object, source: str, task: Task) -> float | None:
    if score is None:
        return None
    if isinstance(score, bool | int | float) and math.isfinite(score) and 0 <= score <= 1:
        return float(score)
    if inspect.iscoroutine(score):
        score.close()
        raise OwnCodeError(f"scorer '{source}' is asynchronous; write `def`, not `async def`: it runs in a thread")
    raise OwnCodeError(
        f"scorer '{source}' returned {score!r:.80} for task '{task.id}'; a score is a number from 0 to 1, or None "
        "where it cannot be told"
    )
