"""Guided attempts: step scores choose the decisions of a further attempt, and its outcome decides whether it counts."""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from msgspec import structs

from envs.types import Task
from rollout.types import Group, StepScores, Trajectory, Turn

GOOD = 0.5
"""The score from which on a decision is taken."""
FIRST, WINDOW, LEAST_SHARE, EVERY = 2, 16, 0.125, 8
"""Groups of a data set that are tried at first; then the least share that must be rescued of the last ones; and which
groups are tried below it."""
ScoreSteps = Callable[[Group], Awaitable[StepScores]]
"""Returns the scores of the planner turns of a group."""
Rest = TypeVar("Rest")


class Earned:
    """The data sets in which guided attempts are worth their tokens.

    A data set's first groups without a right attempt get guided attempts, and later ones as long as enough of the last
    were rescued by them; otherwise only one in `EVERY`. So scores that find nothing cost little, and are tried again.
    """

    def __init__(self) -> None:
        self._num_tries: Counter[str] = Counter()
        self._rescued: defaultdict[str, deque[bool]] = defaultdict(partial(deque, maxlen=WINDOW))
        self._num_skipped: Counter[str] = Counter()

    def wants(self, dataset: str) -> bool:
        """Return whether the next group without a right attempt gets guided ones."""
        rescued = self._rescued[dataset]
        if self._num_tries[dataset] >= FIRST and sum(rescued) < LEAST_SHARE * max(len(rescued), 1):
            self._num_skipped[dataset] += 1
            if self._num_skipped[dataset] % EVERY:
                return False
        self._num_tries[dataset] += 1
        return True

    def note(self, dataset: str, *, rescued: bool) -> None:
        self._rescued[dataset].append(rescued)


@dataclass(kw_only=True)
class Guide:
    """Chooses each decision of one attempt at a task from several samples.

    The first sample with a good score is taken, so what is trained was sampled by the policy. In a state without a good
    one the best is taken, and the rest of the attempt is sampled like any other.
    """

    task: Task
    score_steps: ScoreSteps
    candidates: int
    """Most samples of one decision, at least 2."""
    num_tokens: int = 0
    """Sampled so far, with those of decisions that were not taken."""
    waited_s: float = 0.0
    """Spent waiting for scores."""
    _is_lost: bool = False

    async def choose(
        self, turns: Sequence[Turn], sample: Callable[[], Awaitable[tuple[Turn, Rest]]]
    ) -> tuple[Turn, Rest]:
        """Return one of several samples of the decision that follows an attempt's `turns`, with its score."""
        drawn: list[tuple[Turn, Rest]] = []
        for num in (1, self.candidates - 1):
            new = await asyncio.gather(*(sample() for _ in range(num)))
            self.num_tokens += sum(turn.num_tokens for turn, _ in new)
            if self._is_lost:
                return new[0]
            drawn += await self._scored(turns, new)
            turn, rest = max(drawn, key=lambda one: one[0].score or 0.0)
            if (turn.score or 0.0) >= GOOD:
                break
        else:
            self._is_lost = True
        return structs.replace(turn, num_candidates=len(drawn)), rest

    async def _scored(self, turns: Sequence[Turn], new: Sequence[tuple[Turn, Rest]]) -> list[tuple[Turn, Rest]]:
        started = time.monotonic()
        attempts = (
            Trajectory(
                id=f"{index}", group_id="", task=self.task, turns=(*turns, turn), answer=None, stop_reason="answered"
            )
            for index, (turn, _) in enumerate(new)
        )
        scores = await self.score_steps(Group(id="guided", trajectories=tuple(attempts)))
        self.waited_s += time.monotonic() - started
        return [
            (structs.replace(turn, score=raw[-1] if turn.format_error is None else 0.0), rest)
            for (turn, rest), raw in zip(new, scores.raw, strict=True)
        ]
