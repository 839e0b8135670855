"""How well scores agree with labels and outcomes: plain numbers in, plain numbers out.

None stands for what the data does not define; it is never turned into a 0. Every function of two sides raises
ValueError when they are empty or of different lengths.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Numbers = Sequence[float] | Array
# Of labels in [0, 1]: what rounding leaves of a squared error that is 0.
_NO_ERROR = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Steps that were scored about alike: a calibrated PRM has `mean_label` equal to `mean_pred`."""

    count: int
    mean_pred: float
    mean_label: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfN:
    """The expected result of one pick out of n: by the scores, at random, and by who knows the results."""

    prm: float
    random: float
    oracle: float


def mse(label: Numbers, pred: Numbers) -> float:
    """Mean of (pred - label)^2."""
    return float(np.mean(_errors(label, pred) ** 2))


def mae(label: Numbers, pred: Numbers) -> float:
    """Mean of |pred - label|."""
    return float(np.mean(np.abs(_errors(label, pred))))


def bias(label: Numbers, pred: Numbers) -> float:
    """Mean of pred - label: above 0 where the scores are too kind."""
    return float(np.mean(_errors(label, pred)))


def r2_over(label: Numbers, pred: Numbers, baseline_pred: Numbers) -> float | None:
    """1 - mse(pred) / mse(baseline): the share of the baseline's error that `pred` removes, negative where it
    adds some. None where the baseline makes no error."""
    baseline = mse(label, baseline_pred)
    return 1 - mse(label, pred) / baseline if baseline > _NO_ERROR else None


def average_ranks(values: Numbers) -> Array:
    """Ranks from 1; equal values share the mean of their ranks."""
    _, place, count = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    ranks: Array = (np.cumsum(count) - (count - 1) / 2)[place]
    return ranks


def spearman(first: Numbers, second: Numbers) -> float | None:
    """Pearson correlation of the average ranks. None where one side is constant."""
    a, b = (average_ranks(side) - (len(side) + 1) / 2 for side in _sides(first, second))
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else None


def concordance(label: Numbers, pred: Numbers) -> tuple[int, int]:
    """Pairs that both sides order alike, and pairs that they order oppositely. A tie on either side is neither."""
    a, b = _sides(label, pred)
    order = np.sign(a[:, None] - a) * np.sign(b[:, None] - b)
    return int((order > 0).sum()) // 2, int((order < 0).sum()) // 2


def reliability(label: Numbers, pred: Numbers, *, bins: int) -> list[ReliabilityBin]:
    """Predictions in `bins` bins of equal mass, lowest first. The edges are the predictions' quantiles k / bins;
    equal predictions share a bin, and a bin that gets none has no row."""
    labels, preds = _sides(label, pred)
    # In integers: a quantile that was interpolated and rounded may fall on the wrong side of its own prediction.
    position = np.searchsorted(np.sort(preds), preds, side="right") - 1
    place = np.minimum(position * bins // max(len(preds) - 1, 1), bins - 1)
    return [
        ReliabilityBin(
            count=int((place == k).sum()),
            mean_pred=float(preds[place == k].mean()),
            mean_label=float(labels[place == k].mean()),
        )
        for k in np.unique(place)
    ]


def ece(label: Numbers, pred: Numbers, *, bins: int) -> float:
    """Expected calibration error: |mean prediction - mean label| of the reliability bins, weighted by their size."""
    rows = reliability(label, pred, bins=bins)
    return sum(row.count * abs(row.mean_pred - row.mean_label) for row in rows) / len(label)


def auroc(score: Numbers, positive: Sequence[bool] | Numbers) -> float | None:
    """Probability that a positive is scored above a negative, a tie counting half (Mann-Whitney U). None where
    there is only one class."""
    scores, classes = _sides(score, positive)
    right = classes == 1
    positives, negatives = int(right.sum()), int((~right).sum())
    if not positives or not negatives:
        return None
    wins = float(average_ranks(scores)[right].sum()) - positives * (positives + 1) / 2
    return wins / (positives * negatives)


def best_of_n(score: Numbers, correct: Numbers, n: int) -> BestOfN:
    """Averages over all subsets of size `n` of one group; tied scores share the pick. Raises ValueError where
    the group has fewer than `n` members."""
    scores, results = _sides(score, correct)
    if not 1 <= n <= len(scores):
        raise ValueError(f"no subset of size {n} in a group of {len(scores)}")
    prm, oracle = _expected_pick(scores, results, n), _expected_pick(results, results, n)
    return BestOfN(prm=prm, random=float(results.mean()), oracle=oracle)


def clustered_interval(
    statistic: Callable[..., float | None],
    clusters: Sequence[str],
    columns: Sequence[Array],
    *,
    seed: int,
    num_draws: int,
    within: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[float, float] | None:
    """95% interval of `statistic(*columns)`, whole clusters taken as drawn at random; cut to `within`.

    clusters: of each row of the columns. The statistic without each cluster in turn tells what that cluster
    contributes (the jackknife's pseudo-values, Miller 1974). Over these it is the hull of two intervals: Student's t,
    which is exact where contributions are normal, and the bootstrap-t (Efron and Tibshirani 1993, 12.5), which follows
    their skew but is too narrow where few clusters do not show it. None for fewer than two clusters, where the
    statistic is undefined, with all of them or without one, and for fewer than one draw.
    """
    names, places = np.unique(np.asarray(clusters), return_inverse=True)
    value, count = statistic(*columns), len(names)
    if count < 2 or value is None or num_draws < 1:
        return None
    without = [statistic(*(column[places != cluster] for column in columns)) for cluster in range(count)]
    defined = np.array([one for one in without if one is not None])
    if len(defined) < count:
        return None
    parts = count * value - (count - 1) * defined
    error = float(parts.std(ddof=1)) / math.sqrt(count)
    drawn = parts[np.random.default_rng(seed).integers(count, size=(num_draws, count))]
    errors = drawn.std(axis=1, ddof=1) / math.sqrt(count)
    # A draw of one cluster only has no error of its own.
    varied = errors > 1e-9 * error
    deviations = (drawn.mean(axis=1) - parts.mean())[varied] / errors[varied]
    student = student_t(count - 1)
    low, high = np.percentile(deviations, (2.5, 97.5)) if len(deviations) else (-student, student)
    low, high = value - max(float(high), student) * error, value - min(float(low), -student) * error
    return max(low, within[0]), min(high, within[1])


def student_t(freedom: int) -> float:
    """The 97.5% quantile of Student's t; from 3 degrees of freedom on by its expansion around the normal distribution
    (Abramowitz and Stegun 26.7.5), off by less than 0.2%."""
    if freedom == 1:
        return math.tan(0.475 * math.pi)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def _expected_pick(scores: Array, results: Array, n: int) -> float:
    """Of all subsets of size n, C(up to here, n) - C(below, n) have their highest score at this one."""
    total = 0.0
    for score in np.unique(scores):
        below, here = int((scores < score).sum()), scores == score
        subsets = math.comb(below + int(here.sum()), n) - math.comb(below, n)
        total += subsets * float(results[here].mean())
    return total / math.comb(len(scores), n)


def _errors(label: Numbers, pred: Numbers) -> Array:
    labels, preds = _sides(label, pred)
    return preds - labels


def _sides(first: Sequence[bool] | Numbers, second: Sequence[bool] | Numbers) -> tuple[Array, Array]:
    if len(first) != len(second) or not len(first):
        raise ValueError(f"need two sides of one length, got {len(first)} and {len(second)} numbers")
    return np.asarray(first, dtype=float), np.asarray(second, dtype=float)
