import itertools
import math
import random

import numpy as np
import pytest

from reward.prm.metrics import (
    auroc,
    average_ranks,
    best_of_n,
    bias,
    clustered_interval,
    concordance,
    ece,
    mae,
    mse,
    r2_over,
    reliability,
    spearman,
    student_t,
)

LABEL = [0.0, 0.2, 0.4, 0.4, 0.8, 1.0]
PRED = [0.1, 0.1, 0.5, 0.3, 0.9, 0.8]
GROUPS = [
    [(0.9, 1), (0.4, 0), (0.6, 0), (0.7, 1)],
    [(0.8, 0), (0.3, 1), (0.2, 0), (0.1, 0)],
    [(0.5, 1), (0.6, 1), (0.4, 1), (0.9, 0)],
]


def near(value):
    return pytest.approx(value, abs=1e-9)


def test_regression_errors():
    # Errors .1, -.1, .1, -.1, .1, -.2.
    assert mse(LABEL, PRED) == near(0.09 / 6)
    assert mae(LABEL, PRED) == near(0.7 / 6)
    assert bias(LABEL, PRED) == near(-0.1 / 6)


def test_r2_is_the_share_of_the_baselines_error_that_is_gone():
    constant = [sum(LABEL) / 6] * 6
    assert mse(LABEL, constant) == near(0.115555555556)
    assert r2_over(LABEL, PRED, constant) == near(0.870192307692)
    assert r2_over(LABEL, constant, constant) == near(0.0)
    assert r2_over(LABEL, LABEL[::-1], constant) < 0
    assert r2_over([0.1] * 3, PRED[:3], [sum([0.1] * 3) / 3] * 3) is None


def test_ties_share_the_mean_of_their_ranks():
    assert list(average_ranks([3.0, 1.0, 3.0, 2.0])) == [3.5, 1.0, 3.5, 2.0]


def test_spearman_uses_average_ranks():
    assert spearman(LABEL, PRED) == near(0.911764705882)
    assert spearman(LABEL, [math.exp(9 * value) for value in LABEL]) == near(1.0)
    assert spearman([1.0, 2.0, 3.0], [0.3, 0.2, 0.1]) == near(-1.0)
    assert spearman([0.1] * 6, PRED) is None
    assert spearman(LABEL, [0.7] * 6) is None


def test_pairs_tied_on_either_side_do_not_count():
    assert concordance(LABEL, PRED) == (12, 1)


def test_calibration_error_in_bins_of_equal_mass():
    assert ece(LABEL, PRED, bins=5) == near(0.05)
    assert [row.count for row in reliability(LABEL, PRED, bins=5)] == [2, 1, 1, 2]
    # Two bins: (.1, .1, .3) against (0, .2, .4), (.5, .8, .9) against (.4, 1, .8).
    low, high = reliability(LABEL, PRED, bins=2)
    assert (low.count, low.mean_pred, low.mean_label) == (3, near(0.5 / 3), near(0.6 / 3))
    assert (high.count, high.mean_pred, high.mean_label) == (3, near(2.2 / 3), near(2.2 / 3))
    assert ece(LABEL, PRED, bins=2) == near(0.1 / 6)


def test_bins_hold_about_equally_many_and_never_part_equal_scores():
    scores = np.linspace(0, 1, 1000) ** 3
    assert {row.count for row in reliability(scores, scores, bins=10)} <= {99, 100, 101}
    assert ece(scores, scores, bins=10) == near(0.0)
    (only,) = reliability([0.0, 1.0, 1.0], [0.5] * 3, bins=10)
    assert (only.count, only.mean_label) == (3, near(2 / 3))
    assert ece([0.25], [1.0], bins=10) == near(0.75)


def test_auroc_counts_a_tie_as_half():
    # Of the four pairs: .9 > .5, .9 > .1, .5 = .5, .5 > .1.
    assert auroc([0.9, 0.5, 0.5, 0.1], [True, True, False, False]) == near(3.5 / 4)
    assert auroc([0.2] * 4, [1.0, 0.0, 0.0, 1.0]) == near(0.5)
    assert auroc([0.1, 0.9], [1.0, 0.0]) == near(0.0)
    assert auroc(PRED, [True] * 6) is None
    assert auroc(PRED, [False] * 6) is None


@pytest.mark.parametrize(
    ("n", "prm", "oracle"), [(1, 0.5, 0.5), (2, 0.555555555556, 0.777777777778), (4, 0.333333333333, 1.0)]
)
def test_best_of_n_over_all_subsets(n, prm, oracle):
    picks = [best_of_n(*zip(*group, strict=True), n) for group in GROUPS]
    assert sum(pick.prm for pick in picks) / 3 == near(prm)
    assert sum(pick.random for pick in picks) / 3 == near(0.5)
    assert sum(pick.oracle for pick in picks) / 3 == near(oracle)


def test_best_of_n_is_what_going_through_the_subsets_gives():
    rng = random.Random(3)
    scores = [rng.choice((0.1, 0.4, 0.8)) for _ in range(7)]
    results = [float(rng.random() < 0.4) for _ in range(7)]

    def pick(subset):
        best = [i for i in subset if scores[i] == max(scores[j] for j in subset)]
        return sum(results[i] for i in best) / len(best)

    subsets = list(itertools.combinations(range(7), 3))
    found = best_of_n(scores, results, 3)
    assert found.prm == near(sum(map(pick, subsets)) / len(subsets))
    assert found.oracle == near(sum(max(results[i] for i in one) for one in subsets) / len(subsets))


def test_tied_scores_pick_at_random():
    pick = best_of_n([0.5] * 4, [1.0, 0.0, 0.0, 0.0], 2)
    assert pick.prm == near(pick.random) == near(0.25)


def test_interval_of_a_mean_is_about_that_of_the_normal_distribution():
    values = np.random.default_rng(1).normal(size=400)
    low, high = clustered_interval(np.mean, [str(i) for i in range(400)], [values], seed=2, num_draws=2000)
    spread = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - spread, values.mean() + spread), abs=0.02)


def test_interval_needs_two_clusters_and_a_statistic_that_is_mostly_defined():
    values = np.array([1.0, 2.0, 3.0])
    assert clustered_interval(np.mean, ["a"] * 3, [values], seed=0, num_draws=50) is None
    assert clustered_interval(lambda _: None, list("abc"), [values], seed=0, num_draws=50) is None
    assert clustered_interval(np.mean, list("abc"), [values], seed=0, num_draws=0) is None

    def all_three(drawn):
        return 1.0 if len(set(drawn)) == 3 else None

    assert clustered_interval(all_three, list("abc"), [values], seed=0, num_draws=50) is None


def skewed(rng, count):
    """Mean squared errors of tasks, each of eleven steps that share an error."""
    shared, own = rng.normal(0, 0.2, (count, 1)), rng.normal(0, 0.2, (count, 11))
    return ((shared + own) ** 2).mean(axis=1), 0.08


def normal(rng, count):
    return rng.normal(0.7, 0.18, count), 0.7


def heavy(rng, count):
    return rng.lognormal(0, 0.8, count), math.exp(0.32)


@pytest.mark.parametrize("world", [normal, skewed, heavy])
def test_interval_over_sixteen_tasks_covers_what_it_says(world):
    """600 evaluations: by chance alone a coverage of 0.93 reads below 0.9 once in 500 times."""
    rng, names = np.random.default_rng(7), [str(task) for task in range(16)]
    held = 0
    for draw in range(600):
        values, truth = world(rng, 16)
        low, high = clustered_interval(np.mean, names, [values], seed=draw, num_draws=200)
        held += low <= truth <= high
    assert held / 600 > 0.93 - 0.03


def test_interval_holds_the_statistic_and_ends_where_the_statistic_ends():
    scores, right = np.array([0.9, 0.8, 0.9, 0.1, 0.2, 0.3, 0.85, 0.4]), np.array([1, 1, 1, 0, 0, 0, 0, 1.0])
    names = list("aabbccdd")
    low, high = clustered_interval(auroc, names, [scores, right], seed=0, num_draws=200, within=(0.0, 1.0))
    assert 0 <= low <= auroc(scores, right) <= high == 1


def test_interval_over_tasks_that_do_not_differ_has_no_width():
    assert clustered_interval(np.mean, list("aabb"), [np.full(4, 0.5)], seed=0, num_draws=50) == (0.5, 0.5)


def test_quantiles_of_students_t():
    known = {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 10: 2.228, 15: 2.131, 30: 2.042, 100: 1.984}
    assert {freedom: student_t(freedom) for freedom in known} == pytest.approx(known, rel=2e-3)


@pytest.mark.parametrize("metric", [mse, mae, bias, spearman, concordance, auroc])
def test_sides_of_different_lengths_are_refused(metric):
    with pytest.raises(ValueError, match="got 2 and 1"):
        metric([0.1, 0.2], [0.1])
    with pytest.raises(ValueError, match="got 0 and 0"):
        metric([], [])


def test_group_that_is_too_small_for_n_is_refused():
    with pytest.raises(ValueError, match="size 4 in a group of 2"):
        best_of_n([0.1, 0.2], [0.0, 1.0], 4)
