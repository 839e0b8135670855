"""Scorers of one's own: functions that a recipe or a task names, asked under a time limit and held to their word."""

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache
from numbers import Real

import numpy as np

from configs.plugins import OwnCodeError, check_call, failure, load_own, own_function
from envs.types import Task
from reward.types import StepScores
from rollout.types import Trajectory, TrajectoryGroup, Turn

Scorer = Callable[[Task, str, Sequence[Turn]], object]


def own_score(task: Task, answer: str, turns: Sequence[Turn]) -> float | None:
    """What the function that `task.scorer` names says of an answer: from 0 to 1, or None where it cannot tell.

    Raises OwnCodeError where it raises, takes too long, or returns anything else: such an answer is never a zero.
    """
    source = task.scorer or ""
    call = scorer_of(source)
    score = _asked(lambda: call(task, answer, turns), source, task, limit_s=task.scoring_limit_s)
    return _checked(score, source, f"task '{task.id}'")


class OwnTurnScorer:
    """Scores the turns of a group by a function of one's own, `name(task, answer, turns)`, in a PRM's place."""

    def __init__(self, source: str, *, limit_s: float) -> None:
        """Raises OwnCodeError."""
        self._source = source
        self._limit_s = limit_s
        self._call = own_function(source, key="reward.credit.turn_scorer", takes="task, answer, turns")

    async def score_group(self, group: TrajectoryGroup) -> StepScores:
        """A number from 0 to 1 for each planner turn, or None, which an attempt that broke has everywhere. Raises
        OwnCodeError."""
        asked = (asyncio.to_thread(self._scores, one) for one in group.trajectories)
        return StepScores(raw=tuple(await asyncio.gather(*asked)), prm_digest="")

    def _scores(self, trajectory: Trajectory) -> tuple[float | None, ...]:
        task, answer, turns = trajectory.task, trajectory.answer, trajectory.planner_turns
        if trajectory.stop_reason == "infrastructure":
            return (None,) * len(turns)
        scores = _asked(lambda: self._call(task, answer, turns), self._source, task, limit_s=self._limit_s)
        attempt = f"an attempt at task '{task.id}'"
        if not isinstance(scores, Sequence):
            raise OwnCodeError(
                f"scorer '{self._source}' returned {scores!r:.80} for the {len(turns)} turns of {attempt}; return a "
                "list with a number for each"
            )
        if len(scores) != len(turns):
            raise OwnCodeError(
                f"scorer '{self._source}' returned {len(scores)} scores for the {len(turns)} turns of {attempt}"
            )
        places = (f"turn {number} of {attempt}" for number in range(1, len(turns) + 1))
        return tuple(_checked(score, self._source, place) for score, place in zip(scores, places, strict=True))


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


def _asked(call: Callable[[], object], source: str, task: Task, *, limit_s: float) -> object:
    """What it returns, or what it returns is awaited to. Raises OwnCodeError."""
    said: queue.SimpleQueue[tuple[object, BaseException | None]] = queue.SimpleQueue()
    awaited: list[Future[object]] = []
    given_up = threading.Event()

    def ask() -> None:
        try:
            found = call()
            if inspect.isawaitable(found):
                awaited.append(asyncio.run_coroutine_threadsafe(_result(found), _loop()))
                if given_up.is_set():
                    awaited[0].cancel()
                found = awaited[0].result()
            said.put((found, None))
        except BaseException as error:
            said.put((None, error))

    # Nothing can end a thread from outside; as a daemon it does not keep the process that gives up on it.
    threading.Thread(target=ask, daemon=True, name=source).start()
    try:
        found, error = said.get(timeout=limit_s)
    except queue.Empty:
        # A thread that comes to it later sees that it is given up.
        given_up.set()
        for one in awaited:
            one.cancel()
        raise OwnCodeError(
            f"scorer '{source}' gave no score for task '{task.id}' within {limit_s:g} s; make it faster, or raise "
            "reward.timeout_s"
        ) from None
    if error is not None:
        raise OwnCodeError(f"scorer '{source}' failed on task '{task.id}' with {failure(error)}") from error
    return found


async def _result(found: Awaitable[object]) -> object:
    return await found


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    """One for all scorers of the process: a client that they share keeps its connections."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="asynchronous scorers").start()
    return loop


def _checked(score: object, source: str, place: str) -> float | None:
    if score is None:
        return None
    if isinstance(score, Real | np.bool_) and 0 <= (number := float(score)) <= 1:
        return number
    raise OwnCodeError(
        f"scorer '{source}' returned {score!r:.80} for {place}; a score is a number from 0 to 1, or None where it "
        "cannot be told"
    )
