"""Scoring service of the PRM: one call after another, in pieces that show progress."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from reward.prm.step_text import StepText, step_texts
from rollout.engines.engine import Pulse
from rollout.types import Group, StepScores

SCORED_AT_ONCE = 64
"""Steps per call of the model, after which the service reports progress: the supervisor restarts a part that makes
none. Steps in one call share the computation of common prefixes."""


class StepScorer(Protocol):
    digest: str

    def score(self, steps: Sequence[StepText]) -> list[float | None]: ...


class PrmScorer:
    """A queue around a model that scores in a thread.

    The buffer bounds the queue: a group that waits here holds its place there.
    """

    def __init__(self, prm: StepScorer) -> None:
        self._prm = prm
        self._in_turn = asyncio.Lock()
        self._num_open = 0
        self._num_scored = 0

    @property
    def pulse(self) -> Pulse:
        """Return the number of steps scored so far, and of those that wait."""
        return Pulse(done=self._num_scored, num_open=self._num_open)

    async def score_group(self, group: Group) -> StepScores:
        """Return raw scores of every planner turn. Raise PrmError if the model is broken."""
        steps = [step_texts(trajectory) for trajectory in group.trajectories]
        scores = iter(await self.score([step for trajectory in steps for step in trajectory]))
        raw = tuple(tuple(next(scores) for _ in trajectory) for trajectory in steps)
        return StepScores(raw=raw, prm_digest=self._prm.digest)

    async def score(self, steps: Sequence[StepText]) -> list[float | None]:
        """Return the scores of steps. The steps of one call are scored together, so scores repeat bit for bit."""
        scores: list[float | None] = []
        self._num_open += len(steps)
        try:
            async with self._in_turn:
                for start in range(0, len(steps), SCORED_AT_ONCE):
                    scores += await asyncio.to_thread(self._prm.score, steps[start : start + SCORED_AT_ONCE])
                    self._num_scored += min(SCORED_AT_ONCE, len(steps) - start)
        finally:
            self._num_open -= len(steps)
        return scores
