"""The search for a right attempt at a task, which samples decisions after steps that a labeller calls right."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from reward.prm.step_text import step_texts
from rollout.filters import SOLVED
from rollout.guide import GOOD
from rollout.types import Group, StepScores, Trajectory

CANDIDATES = (8, 32, 128)
"""Samples of a decision at the first visits of a state, and at all later ones."""


async def labels_as_scores(labels: Mapping[str, float], group: Group) -> StepScores:
    """Return the labels of a group's steps, by their digests; None for steps without one."""
    raw = tuple(tuple(labels.get(step.digest) for step in step_texts(one)) for one in group.trajectories)
    return StepScores(raw=raw, prm_digest="")


@dataclass(kw_only=True)
class Search:
    """The attempts at one task."""

    attempts: list[Trajectory]
    _visits: Counter[str] = field(default_factory=Counter)
    """By the text of the last step before the state."""

    @property
    def is_open(self) -> bool:
        return all(one.outcome != SOLVED for one in self.attempts)

    def corrected(self, labels: Mapping[str, float]) -> dict[str, float]:
        """Return labels by the digests of steps, with 0 for answers that have proved wrong, whatever a judge said."""
        proved = (one for one in self.attempts if one.answer is not None and one.outcome not in (None, SOLVED))
        return {**labels, **{step_texts(one)[-1].digest: 0.0 for one in proved if one.planner_turns}}

    def next_state(self, labels: Mapping[str, float]) -> tuple[Trajectory, int, int]:
        """Return an attempt, after how many of its steps decisions are sampled next, and how many.

        `labels` are by the digests of steps. A state is reached by right steps only. The deepest is next, with one step
        less for every three visits: a label may be wrong.
        """
        best: tuple[float, Trajectory, int, str] | None = None
        for attempt in self.attempts:
            state, steps = "", step_texts(attempt)
            # Without an answer it continues after its last step.
            for number in range(len(steps) + (attempt.answer is None)):
                rank = number - self._visits[state] / len(CANDIDATES)
                if best is None or rank > best[0]:
                    best = rank, attempt, number, state
                if number == len(steps) or labels.get(steps[number].digest, 0.0) < GOOD:
                    break
                state = steps[number].digest
        assert best is not None
        _, attempt, num_steps, state = best
        self._visits[state] += 1
        return attempt, num_steps, CANDIDATES[min(self._visits[state], len(CANDIDATES)) - 1]
