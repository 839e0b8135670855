"""The choice of a new group's task, from a family by fixed shares or by what there is to learn."""

import random
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FLOOR = 0.1
"""Weight of a family or a task that teaches nothing; the most is FLOOR + 1/4. Of K families each is drawn with
probability 0.1 / (0.1 + 0.35 (K - 1)) at least: 22% with two, 8.7% with four."""
DECAY = 0.9
"""Factor by which a finished group counts less for each later one of its family."""
NUM_RECENT = 64
"""Finished groups of a family that are looked at; those before would count less than 1/800 each."""
SOLVED_WINDOW = 8
"""New tasks of a family over which its solve rate is shown."""
REPEATED = 0.75
"""Share of a family's draws that ask a task of `teaching` again, as long as one is not being played."""
MAX_VISITS = 4
"""Groups that ask one task."""


class Outcome(NamedTuple):
    """The outcome of a finished group.

    `right` is the sum of its outcomes, `scored` the number of scored trajectories, `visit` how many groups had asked
    the task by then.
    """

    task: int
    right: float
    scored: int
    differed: bool
    visit: int


class Draw(NamedTuple):
    """The family of a task, and the number of the earlier task that it repeats.

    `visit` counts the groups that asked the task, this one included.
    """

    family: str
    repeats: int | None = None
    visit: int = 1

    def played(self, task: int) -> int:
        """Return the number of the task that is asked where this task is due."""
        return task if self.repeats is None else self.repeats


Outcomes = Sequence[Outcome]
"""Of a family, the group that was drawn last first."""
OutcomesOf = Callable[[str], Outcomes]
"""Outcomes of a family."""
DrawOf = Callable[[int], Draw]
"""What the task with this number is."""


class FamilyOutcomes:
    """Outcomes of the last groups of each family, in the order of the groups' numbers."""

    def __init__(self, rows: Mapping[str, Iterable[tuple[int, Outcome]]]) -> None:
        self._rows = defaultdict(list, {family: list(of_family) for family, of_family in rows.items()})

    def add(self, family: str, ordinal: int, outcome: Outcome) -> None:
        """Add the outcome of the group with this number, and forget old ones."""
        insort(self._rows[family], (ordinal, outcome))
        del self._rows[family][:-NUM_RECENT]

    def remove(self, family: str, ordinal: int) -> None:
        self._rows[family] = [row for row in self._rows[family] if row[0] != ordinal]

    def latest(self, family: str) -> Outcomes:
        """Return the outcomes of the last groups, the newest first."""
        return [outcome for _, outcome in reversed(self._rows[family])]

    def solve_rates(self) -> dict[str, float]:
        """Return the share of right trajectories in the last new tasks of each family that has any."""
        rates = {}
        for family in self._rows:
            if outcomes := first_visits(self.latest(family))[:SOLVED_WINDOW]:
                rates[family] = sum(one.right for one in outcomes) / sum(one.scored for one in outcomes)
        return rates

    def rows_without(self, ordinals: Container[int]) -> dict[str, list[tuple[int, Outcome]]]:
        """Return numbers and outcomes by family, without those of the given groups."""
        return {family: [row for row in rows if row[0] not in ordinals] for family, rows in self._rows.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedChoice:
    """By the number of the task alone; none is repeated."""

    names: tuple[str, ...]
    family_of: Callable[[int], str]

    def by(self, outcomes: OutcomesOf, open_tasks: Callable[[], Iterable[int]]) -> DrawOf:
        return lambda task: Draw(self.family_of(task))


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnableChoice:
    """A choice by what there is to learn.

    The family is drawn by `learnable_weight` of its solve rate in recent new tasks, because families that are always or
    never solved give groups without signal. For REPEATED of the draws the task is one of the family's `teaching` tasks,
    by how much they teach. The draw depends on the seed, the number of the task, the outcomes and the tasks in play.
    """

    names: tuple[str, ...]
    seed: int

    def weights(self, outcomes: OutcomesOf) -> Mapping[str, float]:
        return {name: learnable_weight(solve_rate(first_visits(outcomes(name)))) for name in self.names}

    def by(self, outcomes: OutcomesOf, open_tasks: Callable[[], Iterable[int]]) -> DrawOf:
        """Return the choice for the tasks that are drawn next. Ask for each number once, in rising order."""
        weights, played = self.weights(outcomes), set(open_tasks())
        to_repeat = {name: teaching(name, outcomes(name)) for name in self.names}

        def draw(task: int) -> Draw:
            rng = random.Random(f"choice|{self.seed}|{task}")
            (family,) = rng.choices(list(weights), list(weights.values()))
            known = {one: weight for one, weight in to_repeat[family].items() if one.repeats not in played}
            if not known or rng.random() >= REPEATED:
                return Draw(family)
            (again,) = rng.choices(list(known), list(known.values()))
            played.add(again.played(task))
            return again

        return draw


TaskChoice = FixedChoice | LearnableChoice


def first_visits(outcomes: Outcomes) -> Outcomes:
    """Return the outcomes of tasks that were new: what is asked again was chosen by its outcome."""
    return [one for one in outcomes if one.visit == 1 and one.scored]


def solve_rate(outcomes: Outcomes) -> float:
    """Return the mean of a Beta distribution that starts as Beta(1, 1), with counts that decay by DECAY per group."""
    right = sum(DECAY**age * one.right for age, one in enumerate(outcomes))
    scored = sum(DECAY**age * one.scored for age, one in enumerate(outcomes))
    return (1 + right) / (2 + scored)


def learnable_weight(rate: float) -> float:
    """Return FLOOR + p (1 - p), the variance of an outcome, with which a group's advantages scale, plus a floor."""
    return FLOOR + rate * (1 - rate)


def teaching(family: str, outcomes: Outcomes) -> Mapping[Draw, float]:
    """Return the draws of the tasks to ask again, with `learnable_weight` of the share that their last group solved.

    A task leaves when all attempts solve it, when none can be scored, or after MAX_VISITS groups. One without a
    difference stays with the floor: rarely solved tasks would otherwise lose most draws to repeats of the others.
    """
    last: dict[int, Outcome] = {}
    for one in outcomes:
        last.setdefault(one.task, one)
    return {
        Draw(family, task, one.visit + 1): learnable_weight(one.right / one.scored if one.differed else 0.0)
        for task, one in last.items()
        if one.right < one.scored and one.visit < MAX_VISITS
    }
