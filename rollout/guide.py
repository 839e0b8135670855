"""Guided attempts: step scores choose the decisions of a further attempt, and its outcome decides whether it counts."""

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from msgspec import structs

from envs.types import Task
from rollout.types import Group, StepScores, Trajectory, Turn

GOOD = 0.5
"""The score from which on a decision is taken at once."""
WINDOW = 256
"""Groups of a data set over which costs are compared."""
TRIAL = 0.5
"""Groups with signal that guided attempts are credited with in advance."""
ScoreSteps = Callable[[Group], Awaitable[StepScores]]
"""Returns the scores of the planner turns of a group."""
Rest = TypeVar("Rest")


@dataclass(kw_only=True, slots=True)
class Cost:
    """The tokens of a group, and whether they brought signal."""

    tokens: float
    kept: float
    guided_tokens: float = 0.0
    """Those of its guided attempts, and before they have ended what others took on average."""
    rescued: float = 0.0


class Earned:
    """The data sets in which guided attempts are worth their tokens.

    They are as long as they bring a group with signal for no more tokens than plain sampling does. Plain sampling is
    credited with one group more than it brought, and guided attempts with TRIAL. So scores that find nothing cost a
    third of the tokens where plain sampling finds nothing either, and little where it finds something.
    """

    def __init__(self) -> None:
        self._last: defaultdict[str, deque[Cost]] = defaultdict(partial(deque, maxlen=WINDOW))
        self._tried: defaultdict[str, list[Cost]] = defaultdict(list)

    def note(self, dataset: str, facts: Mapping[str, float]) -> Cost:
        """Count a judged group; return its cost, to which that of guided attempts is added."""
        cost = Cost(tokens=facts["sampled_tokens"], kept=facts["kept"])
        self._last[dataset].append(cost)
        return cost

    def begin(self, dataset: str, cost: Cost) -> bool:
        """Return whether this group without a right attempt gets guided ones, and if so count what they may cost."""
        last, tried = self._last[dataset], self._tried[dataset]
        price = sum(one.guided_tokens for one in tried) / max(1, len(tried))
        tokens, guided_tokens = sum(one.tokens for one in last), sum(one.guided_tokens for one in last)
        kept, rescued = sum(one.kept for one in last), sum(one.rescued for one in last)
        if (rescued + TRIAL) * tokens < (kept + 1) * (guided_tokens + price):
            return False
        cost.guided_tokens = price if tried else math.inf  # no others before the cost of the first is known
        tried.append(cost)
        return True


@dataclass(kw_only=True)
class Guide:
    """Chooses each decision of one attempt at a task from several samples.

    A sample with a good score is taken at once. If no candidate has one, the best is taken, and the rest of the attempt
    is sampled like any other.
    """

    task: Task
    score_steps: ScoreSteps
    candidates: int
    """Most samples of one decision, at least 2."""
    num_tokens: int = 0
    """Sampled so far, with those of decisions that were not taken."""
    waited_s: float = 0.0
    """Spent waiting for scores."""
    failure: Exception | None = None
    """Why there were no scores, which ended the attempt."""
    _is_lost: bool = False

    async def choose(
        self, turns: Sequence[Turn], sample: Callable[[], Awaitable[tuple[Turn, Rest]]]
    ) -> tuple[Turn, Rest]:
        """Return one of several samples of the decision that follows an attempt's `turns`, with its score."""
        drawn: list[tuple[Turn, Rest]] = []
        scores: dict[str, float | None] = {}  # of valid texts, some of which the policy samples again and again
        while len(drawn) < self.candidates:
            # Twice as many in every round, so that few are sampled in vain.
            num = min(max(1, len(drawn)), self.candidates - len(drawn))
            new = await asyncio.gather(*(sample() for _ in range(num)))
            self.num_tokens += sum(turn.num_tokens for turn, _ in new)
            if self._is_lost:
                return new[0]
            valid = {turn.text: turn for turn, _ in new if turn.format_error is None}
            if unscored := [turn for text, turn in valid.items() if text not in scores]:
                scores |= await self._scores(turns, unscored)
            drawn += [
                (structs.replace(turn, score=scores[turn.text] if turn.format_error is None else 0.0), rest)
                for turn, rest in new
            ]
            turn, rest = max(drawn, key=lambda one: one[0].score or 0.0)
            if (turn.score or 0.0) >= GOOD:
                break
        self._is_lost = (turn.score or 0.0) < GOOD
        return structs.replace(turn, num_candidates=len(drawn)), rest

    async def _scores(self, turns: Sequence[Turn], samples: Sequence[Turn]) -> dict[str, float | None]:
        """Return the scores of samples of the decision after `turns`, by their texts."""
        started = time.monotonic()
        attempts = (
            Trajectory(
                id=f"{index}", group_id="", task=self.task, turns=(*turns, turn), answer=None, stop_reason="answered"
            )
            for index, turn in enumerate(samples)
        )
        try:
            scores = await self.score_steps(Group(id="guided", trajectories=tuple(attempts)))
        except Exception as error:
            self.failure = error
            raise
        finally:
            self.waited_s += time.monotonic() - started
        return {turn.text: raw[-1] for turn, raw in zip(samples, scores.raw, strict=True)}
