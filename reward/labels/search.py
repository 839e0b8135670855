"""The search for a right attempt at a task, which continues attempts after steps that a labeller calls right."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from reward.prm.step_text import step_texts
from reward.scorers import outcome_of
from rollout.filters import SOLVED
from rollout.guide import GOOD
from rollout.types import Trajectory

FIRST = 4
"""Continuations at the first two visits of a state; every further visit makes twice as many."""
VISITS_PER_STEP = 6
"""Visits after which a state is left for one that is a step less deep: a label may be wrong."""


@dataclass(kw_only=True)
class Search:
    """The attempts at one task."""

    attempts: list[Trajectory]
    _visits: Counter[str] = field(default_factory=Counter)
    """By the text of the last step before the state."""

    @property
    def is_open(self) -> bool:
        return all(outcome_of(one) != SOLVED for one in self.attempts)

    def next_state(self, scores: Mapping[str, float]) -> tuple[Trajectory, int, int]:
        """Return an attempt, after how many of its steps it is continued next, and how often.

        `scores` are labels by the digests of steps. A state is reached by right steps only. The deepest is next, with
        one step less for every VISITS_PER_STEP visits.
        """
        best: tuple[float, Trajectory, int, str] | None = None
        for attempt in self.attempts:
            state = ""
            for step in step_texts(attempt):
                rank = step.step - self._visits[state] / VISITS_PER_STEP
                if best is None or rank > best[0]:
                    best = rank, attempt, step.step, state
                if scores.get(step.digest, 0.0) < GOOD:
                    break
                state = step.digest
        assert best is not None
        _, attempt, num_steps, state = best
        self._visits[state] += 1
        return attempt, num_steps, FIRST * 2 ** min(max(0, self._visits[state] - 2), 4)
