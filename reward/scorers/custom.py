"""Custom scorers: functions that a recipe or a task names, called with a time limit and checked for their result."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Real

import numpy as np

from configs.plugins import OwnCodeError, check_call, failure, in_a_thread, load_own, own_function
from envs.types import Task
from rollout.types import Group, StepScores, Trajectory, Turn

Scorer = Callable[[Task, str, Sequence[Turn]], object]


def own_score(task: Task, answer: str, turns: Sequence[Turn]) -> float | None:
    """Return the score of an answer by the function that `task.scorer` names: from 0 to 1, or None if undecided.

    Raises OwnCodeError if the function raises, takes too long, or returns anything else: such an answer is never a
    zero.
    """
    source = task.scorer or ""
    call = scorer_of(source)
    score = _call_with_limit(lambda: call(task, answer, turns), source, task, limit_s=task.scoring_limit_s)
    return _checked(score, source, f"task '{task.id}'")


class CustomTurnScorer:
    """A custom function `name(task, answer, turns)` that scores the turns of a group instead of a PRM."""

    def __init__(self, source: str, *, limit_s: float) -> None:
        """Load the function. Raise OwnCodeError if that fails."""
        self._source = source
        self._limit_s = limit_s
        self._call = own_function(source, key="reward.credit.turn_scorer", takes="task, answer, turns")

    async def score_group(self, group: Group) -> StepScores:
        """Return a number from 0 to 1, or None, for each planner turn. Raise OwnCodeError.

        An attempt that failed for lack of infrastructure has None everywhere.
        """
        calls = (asyncio.to_thread(self._scores, trajectory) for trajectory in group.trajectories)
        return StepScores(raw=tuple(await asyncio.gather(*calls)), prm_digest="")

    def _scores(self, trajectory: Trajectory) -> tuple[float | None, ...]:
        task, answer, turns = trajectory.task, trajectory.answer, trajectory.planner_turns
        if trajectory.stop_reason == "infrastructure":
            return (None,) * len(turns)
        scores = _call_with_limit(lambda: self._call(task, answer, turns), self._source, task, limit_s=self._limit_s)
        attempt = f"an attempt at task '{task.id}'"
        if not isinstance(scores, Sequence) or len(scores) != len(turns):
            raise OwnCodeError(
                f"scorer '{self._source}' returned {scores!r:.80} for the {len(turns)} turns of {attempt}; return a "
                "list with a number for each"
            )
        places = (f"turn {number} of {attempt}" for number in range(1, len(turns) + 1))
        return tuple(_checked(score, self._source, place) for score, place in zip(scores, places, strict=True))


@lru_cache(maxsize=64)
def scorer_of(source: str) -> Scorer:
    """Return the function as one of task, answer and turns. Raise OwnCodeError if it cannot be called so."""
    function = load_own(source, key="scorer")
    try:
        inspect.signature(function).bind("task", "answer", "turns")
    except (TypeError, ValueError):
        check_call(function, source, key="scorer", takes="task, answer")
        return lambda task, answer, turns: function(task, answer)
    return function


def _call_with_limit(call: Callable[[], object], source: str, task: Task, *, limit_s: float) -> object:
    """Call the function in a thread, await its result if needed, and return it. Raise OwnCodeError."""

    async def result() -> object:
        found = await in_a_thread(call)
        return await found if inspect.isawaitable(found) else found

    future = asyncio.run_coroutine_threadsafe(result(), _loop())
    try:
        return future.result(timeout=limit_s)
    except Exception as error:
        if future.done():
            raise OwnCodeError(f"scorer '{source}' failed on task '{task.id}' with {failure(error)}") from None
        # A thread cannot be ended from outside; what it returns later is dropped.
        future.cancel()
        raise OwnCodeError(
            f"scorer '{source}' gave no score for task '{task.id}' within {limit_s:g} s; make it faster, or raise "
            "reward.timeout_s"
        ) from None


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all scorers in this process, so that clients they share keep their connections."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="asynchronous scorers").start()
    return loop


def _checked(score: object, source: str, place: str) -> float | None:
    if score is None:
        return None
    if isinstance(score, Real | np.bool_) and 0 <= (number := float(score)) <= 1:
        return number
    raise OwnCodeError(
        f"scorer '{source}' returned {score!r:.80} for {place}; a score is a number from 0 to 1, or None if it cannot "
        "be decided"
    )
