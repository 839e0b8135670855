"""Comparisons of several seeds: what the verdict says, the interval shows and p proves is one thing."""

import random

from benchmarks.promised.promise import Measured, Promise
from ray_jobs.statistics import PairedComparison, compare_means, compare_paired

NUM_COMPARISONS = 80


def _agreement(seed: int) -> Measured:
    rng = random.Random(seed)
    against, significant, not_mcnemar = 0, 0, 0
    for _ in range(NUM_COMPARISONS):
        found = compare_means(*_means(rng, count=rng.choice((8, 20, 60, 150)), tries=rng.choice((2, 3, 5))))
        against += not _agrees(found)
        significant += found.p < 0.05
        one_try = _means(rng, count=rng.choice((8, 60)), tries=1)
        not_mcnemar += abs(compare_means(*one_try).p - compare_paired(*one_try).p) > 1e-9
    text = (
        f"{against} of {NUM_COMPARISONS} contradict themselves ({significant} significant); for one seed {not_mcnemar} "
        "have another p than McNemar's test"
    )
    return Measured(text, holds=against == not_mcnemar == 0 and 0 < significant < NUM_COMPARISONS)


def _means(rng: random.Random, *, count: int, tries: int) -> tuple[list[float], list[float]]:
    """Means over tries before and after: many items move a little one way, some move much the other way."""
    little, much, share = rng.uniform(-0.3, 0.3), rng.uniform(-1, 1), rng.uniform(0, 0.4)
    sides: tuple[list[float], list[float]] = ([], [])
    for _ in range(count):
        rate = rng.betavariate(0.7, 0.7)
        moved = rate + (much if rng.random() < share else little)
        for side, chance in zip(sides, (rate, moved), strict=True):
            side.append(sum(rng.random() < chance for _ in range(tries)) / tries)
    return sides


def _agrees(found: PairedComparison) -> bool:
    """Sign and significance are the same by the gain, the interval, p and the words."""
    (low, high), is_significant = found.ci95, found.p < 0.05
    by_interval = 1 if low > 0 else -1 if high < 0 else 0
    by_p = (found.gain > 0) - (found.gain < 0) if is_significant else 0
    return (
        by_interval == by_p
        and low - 1e-9 <= found.gain <= high + 1e-9
        and ("NOT significant" in found.verdict) != is_significant
        and found.verdict.startswith(f"{100 * found.gain:+.1f} points")
    )


PROMISES = [
    Promise(
        name="comparison",
        said="With several seeds the verdict, its interval and its p never contradict each other",
        where="docs/evaluation.md",
        measure=_agreement,
    ),
]
