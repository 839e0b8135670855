"""Scoring in service: steps asked for at the same time are scored together, and none is scored twice."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol

from reward.prm.step_text import StepText, step_texts
from rollout.engines.engine import Pulse
from rollout.types import Group, StepScores

MAX_CACHED = 100_000
SCORED_AT_ONCE = 64
"""Steps after which it shows that the model works: whoever looks on kills what makes no progress. Neighbours share a
prefix, which is computed once in each piece."""


class StepScorer(Protocol):
    digest: str

    def score(self, steps: Sequence[StepText]) -> list[float | None]: ...


class PrmScorer:
    """A cache by content and a batch of everything that waits, around a model that scores in a thread.

    What may wait is bounded by whoever admits groups: a group that waits here holds its place in the buffer.
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
        """Steps scored so far, and those that are being scored."""
        return Pulse(done=self.num_scored, num_open=len(self._in_work))

    async def score_group(self, group: Group) -> StepScores:
        """Raw scores of every planner turn. Raises PrmError when the model is broken."""
        steps = [step_texts(trajectory) for trajectory in group.trajectories]
        scores = await self.score([step for one in steps for step in one])
        rest = iter(scores)
        raw = tuple(tuple(next(rest) for _ in one) for one in steps)
        return StepScores(raw=raw, prm_digest=self._prm.digest)

    async def score(self, steps: Sequence[StepText]) -> list[float | None]:
        """Waits for the batch that is being scored; its end wakes the next, which takes all that wait by then."""
        by_digest = {step.digest: step for step in steps}
        found: dict[str, float | None] = {}
        while missing := self._missing(by_digest, found):
            self._waiting |= {digest: step for digest, step in missing.items() if digest not in self._in_work}
            async with self._scoring:
                if missing.keys() & self._waiting.keys():
                    await self._score_waiting()
        return [found[step.digest] for step in steps]

    def _missing(self, steps: Mapping[str, StepText], found: dict[str, float | None]) -> dict[str, StepText]:
        """Copies what the cache has into `found`, so that eviction cannot take it back; returns the rest."""
        found |= {digest: self._cache[digest] for digest in steps if digest in self._cache}
        return {digest: step for digest, step in steps.items() if digest not in found}

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
