"""Scoring service of the PRM: concurrent requests are batched, and no step is scored twice."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol

from reward.prm.step_text import StepText, step_texts
from rollout.engines.engine import Pulse
from rollout.types import Group, StepScores

MAX_CACHED = 100_000
SCORED_AT_ONCE = 64
"""Steps per call of the model, after which the service reports progress: the supervisor restarts a part that makes
none. Steps in one call share the computation of common prefixes."""


class StepScorer(Protocol):
    digest: str

    def score(self, steps: Sequence[StepText]) -> list[float | None]: ...


class PrmScorer:
    """A cache by content and a queue around a model that scores in a thread.

    The buffer bounds the queue: a group that waits here holds its place there.
    """

    def __init__(self, prm: StepScorer, *, max_cached: int = MAX_CACHED) -> None:
        self._prm = prm
        self._max_cached = max_cached
        self._cache: dict[str, float | None] = {}
        self._waiting: dict[str, StepText] = {}
        self._in_work: set[str] = set()
        self._scoring = asyncio.Lock()
        self.num_scored = 0

    @property
    def pulse(self) -> Pulse:
        """Return the number of steps scored so far, and of those that are being scored."""
        return Pulse(done=self.num_scored, num_open=len(self._in_work))

    async def score_group(self, group: Group) -> StepScores:
        """Return raw scores of every planner turn. Raise PrmError if the model is broken."""
        steps = [step_texts(trajectory) for trajectory in group.trajectories]
        scores = iter(await self.score([step for trajectory in steps for step in trajectory]))
        raw = tuple(tuple(next(scores) for _ in trajectory) for trajectory in steps)
        return StepScores(raw=raw, prm_digest=self._prm.digest)

    async def score(self, steps: Sequence[StepText]) -> list[float | None]:
        """Return the scores of steps, from the cache or from the next batch, which takes all that wait by then."""
        by_digest = {step.digest: step for step in steps}
        scores: dict[str, float | None] = {}
        while missing := self._missing(by_digest, scores):
            self._waiting |= {digest: step for digest, step in missing.items() if digest not in self._in_work}
            async with self._scoring:
                if missing.keys() & self._waiting.keys():
                    await self._score_waiting()
        return [scores[step.digest] for step in steps]

    def _missing(self, steps: Mapping[str, StepText], scores: dict[str, float | None]) -> dict[str, StepText]:
        """Copy cached scores into `scores`, so that eviction cannot remove them; return the steps without one."""
        scores |= {digest: self._cache[digest] for digest in steps if digest in self._cache}
        return {digest: step for digest, step in steps.items() if digest not in scores}

    async def _score_waiting(self) -> None:
        batch, self._waiting = self._waiting, {}
        self._in_work = set(batch)
        try:
            for start in range(0, len(batch), SCORED_AT_ONCE):
                piece = dict(islice(batch.items(), start, start + SCORED_AT_ONCE))
                scores = await asyncio.to_thread(self._prm.score, list(piece.values()))
                self.num_scored += len(piece)
                self._cache |= zip(piece, scores, strict=True)
        finally:
            self._in_work = set()
        for digest in list(self._cache)[: max(0, len(self._cache) - self._max_cached)]:
            del self._cache[digest]
