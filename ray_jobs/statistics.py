"""Paired comparison of two policies on the same items: McNemar, Newcombe, sign-flip permutation."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist

import numpy as np

from rollout.filters import SOLVED


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedComparison:
    """Solve rates of two policies on the same tasks, their difference, and whether it may be chance: `p` by `test`."""

    num_tasks: int
    before: float
    after: float
    only_before: int
    only_after: int
    ci95: tuple[float, float]
    p: float
    test: str

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def verdict(self) -> str:
        low, high = self.ci95
        change = f"{100 * self.gain:+.1f} points (95% interval {100 * low:+.1f} to {100 * high:+.1f})"
        found = "significant" if self.p < 0.05 else "NOT significant"
        return f"{change}, {found}: {self.test} p = {self.p:.3g} on {self.num_tasks} paired tasks"


def compare_paired(before: Sequence[bool | float], after: Sequence[bool | float]) -> PairedComparison:
    """Compare results task by task; a task counts as solved where its score is 1. Raises ValueError for
    lists that are empty or of different lengths."""
    solved = _solved_pairs(before, after)
    only_before = sum(first and not second for first, second in solved)
    only_after = sum(second and not first for first, second in solved)
    return PairedComparison(
        num_tasks=len(solved),
        before=sum(first for first, _ in solved) / len(solved),
        after=sum(second for _, second in solved) / len(solved),
        only_before=only_before,
        only_after=only_after,
        ci95=paired_gain_interval(before, after),
        p=mcnemar_exact(only_before, only_after),
        test="exact McNemar",
    )


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided exact McNemar test: the binomial probability of a split at least as uneven as this one
    of the tasks that exactly one policy solved. 1 where there are none."""
    discordant = only_a + only_b
    tail = sum(math.comb(discordant, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**discordant)


def compare_means(before: Sequence[float], after: Sequence[float]) -> PairedComparison:
    """Compare tasks that were tried several times, by each task's mean score in [0, 1].

    `only_before` counts the tasks with the higher mean before. Test and interval are those of `sign_flip`. Raises
    ValueError as `compare_paired`.
    """
    if len(before) != len(after) or not before:
        raise ValueError(f"need the same tasks on both sides, got {len(before)} and {len(after)} results")
    differences = [second - first for first, second in zip(before, after, strict=True)]
    tested = sign_flip(differences)
    return PairedComparison(
        num_tasks=len(before),
        before=_mean(before),
        after=_mean(after),
        only_before=sum(one < 0 for one in differences),
        only_after=sum(one > 0 for one in differences),
        ci95=tested.ci95,
        p=tested.p,
        test="exact sign-flip permutation test",
    )


def _mean(scores: Sequence[float]) -> float:
    """Rounded, for a sum depends on the order in its last bits, and the difference of two means on nothing else where
    they are equal."""
    return round(math.fsum(scores) / len(scores), 12)


def items_needed(gain: float, discordant: float, *, power: float = 0.8, alpha: float = 0.05) -> int | None:
    """Paired tasks in which the test at `alpha` finds a true `gain` with about this power; None for no gain.

    `discordant` in [0, 1] is the share of tasks that exactly one side solves (for means over several tries, the mean
    squared difference). Miettinen's formula as Connor gives it (Biometrics 43, 1987), plus the tasks that the exact
    test costs: its continuity correction takes one of the discordant tasks away.
    """
    if gain == 0:
        return None
    share = max(discordant, abs(gain))
    normal = NormalDist()
    error, detection = normal.inv_cdf(1 - alpha / 2), normal.inv_cdf(power)
    spread = error * math.sqrt(share) + detection * math.sqrt(share - gain**2)
    # Fewer discordant tasks than this cannot be significant, however they fall.
    fewest = math.floor(math.log2(2 / alpha)) + 1
    return max(math.ceil((spread / gain) ** 2 + 1 / abs(gain)), math.ceil(fewest / share))


def wilson_interval(successes: float, count: int, *, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a proportion (95% by default); (0, 1) where nothing was counted. `successes` is a
    whole number, or a sum of tasks' means over several tries: then the tasks are what was counted."""
    if count == 0:
        return 0.0, 1.0
    rate = successes / count
    centre = rate + z**2 / (2 * count)
    spread = z * math.sqrt(rate * (1 - rate) / count + z**2 / (4 * count**2))
    scale = 1 + z**2 / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def paired_gain_interval(before: Sequence[bool | float], after: Sequence[bool | float]) -> tuple[float, float]:
    """95% interval of (after - before) for paired proportions: Newcombe's method 10 (Stat Med 17, 1998),
    Wilson intervals of both rates joined through the correlation of the pairs."""
    solved = _solved_pairs(before, after)
    count = len(solved)
    both = sum(first and second for first, second in solved)
    only_before = sum(first and not second for first, second in solved)
    only_after = sum(second and not first for first, second in solved)
    neither = count - both - only_before - only_after
    first, second = (both + only_before) / count, (both + only_after) / count
    low_1, high_1 = wilson_interval(both + only_before, count)
    low_2, high_2 = wilson_interval(both + only_after, count)
    phi = _correlation(both, only_before, only_after, neither)
    gain = second - first
    below = (second - low_2) ** 2 - 2 * phi * (second - low_2) * (high_1 - first) + (high_1 - first) ** 2
    above = (high_2 - second) ** 2 - 2 * phi * (high_2 - second) * (first - low_1) + (first - low_1) ** 2
    return gain - math.sqrt(max(below, 0.0)), gain + math.sqrt(max(above, 0.0))


def _correlation(both: int, only_a: int, only_b: int, neither: int) -> float:
    margins = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    if margins == 0:
        return 0.0
    excess = both * neither - only_a * only_b
    count = both + only_a + only_b + neither
    # Newcombe's continuity correction applies to positive correlation only.
    corrected = max(excess - count / 2, 0) if excess > 0 else excess
    return corrected / math.sqrt(margins)


def _solved_pairs(before: Sequence[bool | float], after: Sequence[bool | float]) -> list[tuple[bool, bool]]:
    if len(before) != len(after) or not before:
        raise ValueError(f"need the same tasks on both sides, got {len(before)} and {len(after)} results")
    return [(first == SOLVED, second == SOLVED) for first, second in zip(before, after, strict=True)]


FINEST_GRID = 10_000
NUM_DRAWS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SignFlip:
    """Two-sided p, and the 95% interval of the mean difference: it holds 0 exactly where p >= 0.05."""

    p: float
    ci95: tuple[float, float]


def sign_flip(differences: Sequence[float], *, seed: int = 0) -> SignFlip:
    """Test and interval of differences in [-1, 1], one an item. Raises ValueError without any.

    p is exact: means over tries lie on a grid, and so do their sums. (Differences on no common grid of at most
    FINEST_GRID steps are rounded to that one.) The interval holds the shifts that the test does not refuse: its ends
    are quantiles of the means of random subsets of the items (Hartigan, JASA 64, 1969), from NUM_DRAWS subsets drawn
    with `seed`; which side of 0 they are on, the exact p decides. One item that is wholly gained and one that is wholly
    lost are added for the interval, as Agresti and Min add pairs (Stat Med 24, 2005): without them it is a point where
    all items differ alike.
    """
    if not differences:
        raise ValueError("need at least one difference")
    fractions = [Fraction(one).limit_denominator(FINEST_GRID) for one in differences]
    grid = min(math.lcm(*(one.denominator for one in fractions)), FINEST_GRID)
    counts = Counter(round(one * grid) for one in fractions)
    total = sum(value * count for value, count in counts.items())
    p = _as_far(counts, abs(total))
    ends = [
        _lower_end(_mirrored(counts, sign), grid, above_0=p < 0.05 and sign * total > 0, seed=seed) for sign in (1, -1)
    ]
    return SignFlip(p=p, ci95=(ends[0] / grid, -ends[1] / grid))


def _mirrored(counts: Counter[int], sign: int) -> Counter[int]:
    return Counter({sign * value: count for value, count in counts.items()})


def _as_far(counts: Counter[int], total: int) -> float:
    """The probability that the sum of the values with random signs is at least `total` away from 0."""
    sizes = Counter[int]()
    for value, count in counts.items():
        sizes[abs(value)] += count
    del sizes[0]
    chances: np.ndarray = np.ones(1)
    for size, count in sorted(sizes.items()):
        chances = _with_signs(chances, size, count)
    tail = float(chances[len(chances) // 2 + total :].sum())
    return 1.0 if total == 0 else min(1.0, 2 * tail)


def _with_signs(chances: np.ndarray, size: int, count: int) -> np.ndarray:
    """The chances of each sum after so many values of this size more. With k of them positive they add
    (2 k - count) size: few places, that are 2 size apart, of many."""
    spread = np.zeros(len(chances) + 2 * size * count)
    for heads, chance in enumerate(_binomial(count)):
        start = 2 * size * heads
        spread[start : start + len(chances)] += chance * chances
    return spread


def _binomial(count: int) -> list[float]:
    """The chance of each number of heads of so many coins, from whole numbers, so that none is rounded away."""
    ways = [1]
    for heads in range(count):
        ways.append(ways[-1] * (count - heads) // (heads + 1))
    return [number / 2**count for number in ways]


def _lower_end(counts: Counter[int], grid: int, *, above_0: bool, seed: int) -> float:
    """The 2.5% quantile of the means of random subsets, with every item in half of them. An empty subset refuses no
    shift: it is below all."""
    rng = np.random.default_rng(seed)
    sums, sizes = np.zeros(NUM_DRAWS), np.zeros(NUM_DRAWS)
    # To draw items is to draw how many there are of each difference.
    for value, count in sorted((counts + Counter((grid, -grid))).items()):
        drawn = rng.binomial(count, 0.5, size=NUM_DRAWS)
        sums += value * drawn
        sizes += drawn
    means = np.sort(np.divide(sums, sizes, out=np.full(NUM_DRAWS, -float(grid)), where=sizes > 0))
    place, first_above_0 = NUM_DRAWS // 40, int(np.searchsorted(means, 0, side="right"))
    return float(means[max(place, first_above_0) if above_0 else min(place, first_above_0 - 1)])
