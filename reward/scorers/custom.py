"""Custom scorers: functions that a recipe or a task names, called in a process with a time limit, and their results."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Real

import numpy as np

from configs.api_keys import without_secrets
from configs.plugins import OwnCodeError, check_call, load_own, own_function
from envs.types import Task
from reward.scorers.process import ScoringError, scored
from rollout.types import Group, StepScores, Trajectory, Turn

MAX_FAILURES = 32
"""Attempts in a row at which a scorer of turns may fail. Beyond it the run ends: it would train without turn scores."""

Scorer = Callable[[Task, str | None, Sequence[Turn]], object]

_ADVICE = "; make it faster, or raise reward.timeout_s"


def own_score(task: Task, answer: str, turns: Sequence[Turn]) -> float | None:
    """Return the score of an answer by the function that `task.scorer` names: from 0 to 1, or None if undecided.

    Raises OwnCodeError if the function cannot be loaded, and ScoringError if it fails: such an answer is never a zero.
    """
    source, limit_s = task.scorer or "", task.scoring_limit_s
    # It was checked in the process that computed it.
    return scored(  # type: ignore[return-value]
        _answer_scorer, source, (task, answer, turns), limit_s=limit_s, what=f"scorer '{source}'", advice=_ADVICE
    )


class CustomTurnScorer:
    """A custom function `name(task, answer, turns)` that scores the turns of a group instead of a PRM."""

    def __init__(self, source: str, *, limit_s: float) -> None:
        """Load the function. Raise OwnCodeError if that fails."""
        self._source = source
        self._limit_s = limit_s
        self._num_failures = 0
        _turn_scorer(source)

    async def score_group(self, group: Group) -> StepScores:
        """Return a number from 0 to 1, or None, for each planner turn; None everywhere where the function fails.

        Raises OwnCodeError if the function cannot be loaded, or fails MAX_FAILURES times in a row.
        """
        calls = (asyncio.to_thread(self._scores, trajectory) for trajectory in group.trajectories)
        return StepScores(raw=tuple(await asyncio.gather(*calls)), prm_digest="")

    def _scores(self, trajectory: Trajectory) -> tuple[float | None, ...]:
        turns = trajectory.planner_turns
        unscored = (None,) * len(turns)
        if trajectory.stop_reason == "infrastructure":
            return unscored
        arguments, what = (trajectory.task, trajectory.answer, turns), f"turn scorer '{self._source}'"
        try:
            scores = scored(_turn_scorer, self._source, arguments, limit_s=self._limit_s, what=what, advice=_ADVICE)
            assert isinstance(scores, tuple)
            if len(scores) != len(turns):
                raise ScoringError(f"{what} returned {len(scores)} scores for {len(turns)} turns; return one for each")
        except ScoringError as error:
            trajectory.failure = str(error)
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                raise OwnCodeError(f"{error}; it failed at {self._num_failures} attempts in a row") from None
            return unscored
        self._num_failures = 0
        return scores


@lru_cache(maxsize=64)
def scorer_of(source: str) -> Scorer:
    """Return the function as one of task, answer and turns. Raise OwnCodeError if it cannot be called so."""
    function = load_own(source, key="scorer")
    if reads_turns(source):
        return function
    check_call(function, source, key="scorer", takes="task, answer")
    return lambda task, answer, turns: function(task, answer)


def reads_turns(source: str) -> bool:
    """Return whether a custom scorer also takes what the agent did, and not its answer alone."""
    try:
        inspect.signature(load_own(source, key="scorer")).bind("task", "answer", "turns")
    except (TypeError, ValueError):
        return False
    return True


def _answer_scorer(source: str) -> tuple[Callable[..., object], Callable[..., object]]:
    return scorer_of(source), _score_of


def _turn_scorer(source: str) -> tuple[Callable[..., object], Callable[..., object]]:
    return own_function(source, key="reward.credit.turn_scorer", takes="task, answer, turns"), _scores_of


def _score_of(score: object) -> float | None:
    if score is None:
        return None
    if isinstance(score, Real | np.bool_) and 0 <= (number := float(score)) <= 1:
        return number
    raise ScoringError(
        f"returned {without_secrets(repr(score)):.80}; a score is a number from 0 to 1, or None if it cannot be decided"
    )


def _scores_of(scores: object) -> tuple[float | None, ...]:
    if not isinstance(scores, Sequence):
        raise ScoringError(f"returned a {type(scores).__name__}; return a list with a number for each turn")
    return tuple(map(_score_of, scores))
