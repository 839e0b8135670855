"""The paired sign-flip permutation test of a mean difference, and the interval that belongs to it.

Where two policies are equally good, each item's difference is as likely as its opposite. The test asks how often
differences of these sizes with random signs have a mean as far from 0 as the one that was seen. For one try an item it
is the exact McNemar test.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

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
    for size, count in sizes.items():
        # With k of them positive their sum is (2 k - count) size: places that are 2 size apart.
        signs = np.zeros(2 * size * count + 1)
        signs[:: 2 * size] = _binomial(count)
        chances = np.convolve(chances, signs)
    tail = float(chances[len(chances) // 2 + total :].sum())
    return 1.0 if total == 0 else min(1.0, 2 * tail)


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
