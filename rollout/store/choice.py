"""Which family of tasks a new group is drawn from: by fixed shares, or by what there is to learn."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

FLOOR = 0.1
"""Weight of a family that teaches nothing; the most that one can have is FLOOR + 1/4. Of K families each is drawn with
probability 0.1 / (0.1 + 0.35 (K - 1)) at least: 22% with two, 8.7% with four."""

DECAY = 0.9
"""A finished group counts so much less for each group of its family that was drawn later and is finished."""

NUM_RECENT = 64
"""Finished groups of a family that are looked at; those before would count less than 1/800 each."""

Outcomes = Sequence[tuple[float, int]]
"""Sum of the outcomes and number of scored trajectories of each finished group of a family, the one drawn last first.
Only trajectories that begin with the task count."""
OutcomesOf = Callable[[str, int], Outcomes]
"""Of a family, so many at most."""
FamilyOf = Callable[[int], str | None]
"""The family of the task with this number; None where nobody chooses."""


def nobody_chooses(task: int) -> None:
    """Whoever makes the task decides by its number."""
    return


class FamilyChoice(Protocol):
    @property
    def names(self) -> tuple[str, ...]:
        """All that can be chosen."""
        ...

    def by(self, outcomes: OutcomesOf) -> FamilyOf:
        """The choice for the tasks that are drawn next, by what came of others until now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedChoice:
    """By the number of the task alone, whatever comes of it."""

    names: tuple[str, ...]
    family_of: FamilyOf

    def by(self, outcomes: OutcomesOf) -> FamilyOf:
        return self.family_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnableChoice:
    """At random by `learnable_weight` of each family's recent solve rate: families that are solved always or never give
    groups without signal. The seed, the number of the task and the outcomes decide; the draw itself explores, so rates
    are taken at the mean of what is believed of them."""

    names: tuple[str, ...]
    seed: int

    def weights(self, outcomes: OutcomesOf) -> Mapping[str, float]:
        return {name: learnable_weight(solve_rate(outcomes(name, NUM_RECENT))) for name in self.names}

    def by(self, outcomes: OutcomesOf) -> FamilyOf:
        weights = self.weights(outcomes)

        def family_of(task: int) -> str:
            rng = random.Random(f"choice|{self.seed}|{task}")
            return rng.choices(list(weights), list(weights.values()))[0]

        return family_of


def solve_rate(outcomes: Outcomes) -> float:
    """The mean of a Beta distribution that begins as Beta(1, 1), with counts that decay by DECAY per group; 0.5 where
    nothing is known."""
    right = sum(DECAY**age * one for age, (one, _) in enumerate(outcomes))
    scored = sum(DECAY**age * num for age, (_, num) in enumerate(outcomes))
    return (1 + right) / (2 + scored)


def learnable_weight(rate: float) -> float:
    """FLOOR + p (1 - p): the variance of an outcome, which is what a group's advantages are made of, and a floor that
    keeps every family in the run."""
    return FLOOR + rate * (1 - rate)
