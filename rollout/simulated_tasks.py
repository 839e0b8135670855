"""What a simulated group takes and comes to: drawn from a distribution, or from the groups of an earlier run."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Fate = Literal["signal", "all_right", "all_wrong", "failed"]

TOKENS_PER_S = 1000
"""Only the proportions count: the tokens of a group stand for its seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTask:
    """The seconds that a group of this task takes on an idle worker, at every attempt, and what it comes to."""

    seconds: float
    fate: Fate

    @property
    def tokens(self) -> int:
        return max(1, round(self.seconds * TOKENS_PER_S))


class TaskSource(Protocol):
    def draw(self, rng: random.Random) -> DrawnTask: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalTasks:
    """Seconds with this median and the standard deviation `sigma` of their logarithm; 0 makes all alike. `shares` say
    what groups come to, whatever they take."""

    median_s: float
    sigma: float
    shares: Mapping[Fate, float] = field(default_factory=lambda: {"signal": 1.0})

    def draw(self, rng: random.Random) -> DrawnTask:
        return DrawnTask(seconds=self.median_s * rng.lognormvariate(0.0, self.sigma), fate=_fate(self.shares, rng))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoTasks:
    """Seconds with this median, of which a share that falls like t to the power of -alpha is longer than t; below 2
    their variance is infinite."""

    median_s: float
    alpha: float
    shares: Mapping[Fate, float] = field(default_factory=lambda: {"signal": 1.0})

    def draw(self, rng: random.Random) -> DrawnTask:
        least_s = self.median_s / 2 ** (1 / self.alpha)
        return DrawnTask(seconds=least_s * rng.paretovariate(self.alpha), fate=_fate(self.shares, rng))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTasks:
    """Groups as they were measured, seconds and fate together: what is hard may be slow and come to nothing."""

    groups: Sequence[DrawnTask]

    def draw(self, rng: random.Random) -> DrawnTask:
        return rng.choice(self.groups)


class TaskStream:
    """The tasks by number. They are drawn in this order whoever asks, so all runs with one seed meet the same ones."""

    def __init__(self, source: TaskSource, seed: int) -> None:
        self._source = source
        self._rng = random.Random(seed)
        self._drawn: list[DrawnTask] = []

    def __getitem__(self, number: int) -> DrawnTask:
        while len(self._drawn) <= number:
            self._drawn.append(self._source.draw(self._rng))
        return self._drawn[number]


def _fate(shares: Mapping[Fate, float], rng: random.Random) -> Fate:
    return rng.choices(list(shares), list(shares.values()))[0]
