"""Paired comparison of two policies on the same items: McNemar, Newcombe, sign-flip permutation."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist, fmean

import numpy as np

from rollout.filters import SOLVED


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedComparison:
    """Solve rates in [0, 1] of two policies on the same tasks, and the test of their difference."""

    num_tasks: int
    before: float
    after: float
    only_before: int
    only_after: int
    """Tasks with the higher score on one side."""
    ci95: tuple[float, float]
    """95% interval of the gain."""
    p: float
    """Two-sided."""
    test: str
    discordant: float
    """Mean squared difference: for one try, the share of tasks that exactly one side solves."""

    @property
    def gain(self) -> float:
        """The rate after, less the one before, without the last bits in which equal means may differ."""
        return round(self.after - self.before, 12)

    @property
    def verdict(self) -> str:
        """The gain with its interval and significance, in one line."""
        low, high = self.ci95
        change = f"{100 * self.gain:+.1f} points (95% interval {100 * low:+.1f} to {100 * high:+.1f})"
        result = "significant" if self.p < 0.05 else "NOT significant"
        return f"{change}, {result}: {self.test} p = {self.p:.3g} on {counted(self.num_tasks, 'paired task')}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 task` and `2 tasks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def compare_paired(before: Sequence[bool | float], after: Sequence[bool | float]) -> PairedComparison:
    """Compare results task by task, with McNemar's test and Newcombe's interval. A task is solved if its score is 1."""
    first, second = ([score == SOLVED for score in side] for side in (before, after))
    pairs = Counter(zip(first, second, strict=True))
    only_before, only_after = pairs[True, False], pairs[False, True]
    ci95 = newcombe_interval(pairs[True, True], only_before, only_after, pairs[False, False])
    return _comparison(first, second, ci95=ci95, p=mcnemar_exact(only_before, only_after), test="exact McNemar")


def compare_means(before: Sequence[float], after: Sequence[float]) -> PairedComparison:
    """Compare tasks by their mean score in [0, 1] over several tries, with the test and interval of `sign_flip`."""
    p, ci95 = sign_flip([second - first for first, second in zip(before, after, strict=True)])
    return _comparison(before, after, ci95=ci95, p=p, test="exact sign-flip permutation test")


def _comparison(
    before: Sequence[float], after: Sequence[float], *, ci95: tuple[float, float], p: float, test: str
) -> PairedComparison:
    differences = [second - first for first, second in zip(before, after, strict=True)]
    return PairedComparison(
        num_tasks=len(differences),
        before=fmean(before),
        after=fmean(after),
        only_before=sum(difference < 0 for difference in differences),
        only_after=sum(difference > 0 for difference in differences),
        ci95=ci95,
        p=p,
        test=test,
        discordant=sum(difference**2 for difference in differences) / len(differences),
    )


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Return the two-sided p of the exact McNemar test.

    It is the binomial probability that the tasks which exactly one policy solved split at least as unevenly as here.
    """
    discordant = only_a + only_b
    tail = sum(math.comb(discordant, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**discordant)


def items_needed(gain: float, discordant: float) -> int | None:
    """Return the paired tasks with which the test at 5% finds a true `gain` with a power of 80%, None without a gain.

    `discordant` in [0, 1] is the share of tasks that exactly one side solves (for means over several tries, the mean
    squared difference). Miettinen's formula as Connor gives it (Biometrics 43, 1987), plus the tasks that the exact
    test costs: its continuity correction takes one of the discordant tasks away.
    """
    if gain == 0:
        return None
    share = max(discordant, abs(gain))
    normal = NormalDist()
    error, detection = normal.inv_cdf(0.975), normal.inv_cdf(0.8)
    spread = error * math.sqrt(share) + detection * math.sqrt(share - gain**2)
    # Fewer discordant tasks than this cannot be significant, however they fall.
    fewest = math.floor(math.log2(2 / 0.05)) + 1
    return max(math.ceil((spread / gain) ** 2 + 1 / abs(gain)), math.ceil(fewest / share))


def wilson_interval(successes: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95% score interval of a proportion (JASA 22, 1927), and (0, 1) for a count of 0.

    `successes` is a whole number, or the sum of the means of `count` tasks over several tries.
    """
    if count == 0:
        return 0.0, 1.0
    rate, z = successes / count, 1.959964
    centre = rate + z**2 / (2 * count)
    spread = z * math.sqrt(rate * (1 - rate) / count + z**2 / (4 * count**2))
    scale = 1 + z**2 / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def newcombe_interval(both: int, only_before: int, only_after: int, neither: int) -> tuple[float, float]:
    """Return the 95% interval of (after - before) for paired proportions, from how many tasks which side solves.

    Newcombe's method 10 (Stat Med 17, 1998) combines the Wilson intervals of both rates through the correlation of the
    pairs.
    """
    count = both + only_before + only_after + neither
    first, second = (both + only_before) / count, (both + only_after) / count
    low_1, high_1 = wilson_interval(both + only_before, count)
    low_2, high_2 = wilson_interval(both + only_after, count)
    margins = (both + only_before) * (only_after + neither) * (both + only_after) * (only_before + neither)
    excess: float = both * neither - only_before * only_after
    if excess > 0:
        # The continuity correction applies to positive correlation only.
        excess = max(excess - count / 2, 0)
    phi = excess / math.sqrt(margins) if margins else 0.0
    gain = second - first
    below = (second - low_2) ** 2 - 2 * phi * (second - low_2) * (high_1 - first) + (high_1 - first) ** 2
    above = (high_2 - second) ** 2 - 2 * phi * (high_2 - second) * (first - low_1) + (first - low_1) ** 2
    return gain - math.sqrt(max(below, 0.0)), gain + math.sqrt(max(above, 0.0))


FINEST_GRID = 10_000
NUM_DRAWS = 100_000


def sign_flip(differences: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the two-sided p and the 95% interval of the mean of one difference in [-1, 1] for each item.

    The interval contains 0 if and only if p >= 0.05.

    p is exact: means over tries lie on a grid, and so do their sums. Differences without a common grid of at most
    FINEST_GRID steps are rounded to that one. The interval contains the shifts that the test does not reject: its ends
    are quantiles of the means of random subsets of the items (Hartigan, JASA 64, 1969), from NUM_DRAWS random
    subsets; the exact p decides on which side of 0 they lie. One item that is wholly gained and one that is wholly
    lost are added for the interval, as Agresti and Min add pairs (Stat Med 24, 2005): otherwise it has no width if all
    items differ alike.
    """
    fractions = [Fraction(difference).limit_denominator(FINEST_GRID) for difference in differences]
    grid = min(math.lcm(*(fraction.denominator for fraction in fractions)), FINEST_GRID)
    counts = Counter(round(fraction * grid) for fraction in fractions)
    total = sum(value * count for value, count in counts.items())
    p = _as_far(counts, abs(total))
    mirrored = Counter({-value: count for value, count in counts.items()})
    low = _lower_end(counts, grid, above_0=p < 0.05 and total > 0)
    high = -_lower_end(mirrored, grid, above_0=p < 0.05 and total < 0)
    return p, (low / grid, high / grid)


def _as_far(counts: Counter[int], total: int) -> float:
    # The probability that the sum of the values with random signs is at least `total` away from 0.
    chances: np.ndarray = np.ones(1)
    for value, count in sorted(counts.items(), key=lambda one: abs(one[0])):  # the small ones first: shorter arrays
        step = 2 * abs(value)
        for _ in range(count if value else 0):
            chances = (np.pad(chances, (0, step)) + np.pad(chances, (step, 0))) / 2
    tail = float(chances[len(chances) // 2 + total :].sum())
    return 1.0 if total == 0 else min(1.0, 2 * tail)


def _lower_end(counts: Counter[int], grid: int, *, above_0: bool) -> float:
    # The 2.5% quantile of the means of random subsets, which hold each item with a chance of 1/2. An empty subset
    # rejects no shift: it lies below all.
    rng = np.random.default_rng(0)
    sums, sizes = np.zeros(NUM_DRAWS), np.zeros(NUM_DRAWS)
    # Items of equal difference are drawn together.
    for value, count in sorted((counts + Counter((grid, -grid))).items()):
        drawn = rng.binomial(count, 0.5, size=NUM_DRAWS)
        sums += value * drawn
        sizes += drawn
    means = np.sort(np.divide(sums, sizes, out=np.full(NUM_DRAWS, -float(grid)), where=sizes > 0))
    place, first_above_0 = NUM_DRAWS // 40, int(np.searchsorted(means, 0, side="right"))
    return float(means[max(place, first_above_0) if above_0 else min(place, first_above_0 - 1)])
