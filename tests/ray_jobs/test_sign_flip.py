import math
import random
from itertools import product
from statistics import NormalDist

import pytest

from ray_jobs.statistics import mcnemar_exact, sign_flip


def by_enumeration(differences):
    """Every way to give the signs, one by one."""
    seen = abs(sum(differences))
    sums = [abs(sum(flipped)) for flipped in product(*((one, -one) for one in differences))]
    return sum(total >= seen - 1e-9 for total in sums) / len(sums)


def drawn(rng, count, *, seeds=(3, 3), gain=0.0):
    """Differences of items' means over so many tries before and after."""
    rates = [rng.betavariate(0.5, 0.5) for _ in range(count)]
    return [
        sum(rng.random() < min(1, rate + gain) for _ in range(seeds[1])) / seeds[1]
        - sum(rng.random() < rate for _ in range(seeds[0])) / seeds[0]
        for rate in rates
    ]


def test_p_by_hand():
    # 1/3, 1/3 and -1 of any signs: sums 5/3, 1, 1, 1/3 and their opposites; all 8 are at least 1/3 away from 0.
    assert sign_flip([1 / 3, 1 / 3, -1.0]).p == 1.0
    # All of one sign: that and its opposite, of 8.
    assert sign_flip([1 / 3, 2 / 3, 1.0]).p == 0.25
    # Items that do not differ say nothing.
    assert sign_flip([1 / 3, 2 / 3, 1.0, 0.0, 0.0]).p == 0.25
    assert sign_flip([0.0] * 7).p == 1.0
    with pytest.raises(ValueError, match="at least one"):
        sign_flip([])


@pytest.mark.parametrize("seeds", [(3, 3), (7, 7), (2, 5), (1, 1)])
def test_p_is_that_of_every_way_to_give_the_signs(seeds):
    rng = random.Random(sum(seeds))
    for _ in range(5):
        differences = drawn(rng, 11, seeds=seeds, gain=0.2)
        assert sign_flip(differences).p == pytest.approx(by_enumeration(differences), rel=1e-9)


def test_items_with_different_numbers_of_tries_are_tested_quickly():
    """Unscored tries put the means on a fine grid, most of whose places are empty."""
    rng = random.Random(0)
    differences = [
        rng.randint(0, before) / before - rng.randint(0, after) / after
        for before, after in ((rng.randint(13, 16), rng.randint(13, 16)) for _ in range(300))
    ]
    deviations = abs(sum(differences)) / math.sqrt(sum(one**2 for one in differences))
    assert sign_flip(differences).p == pytest.approx(2 * NormalDist().cdf(-deviations), abs=0.01)


def test_for_one_try_an_item_it_is_mcnemars_exact_test():
    for only_before, only_after in [(0, 0), (3, 3), (1, 7), (13, 18), (0, 217), (400, 500)]:
        differences = [-1.0] * only_before + [1.0] * only_after + [0.0] * 9
        assert sign_flip(differences).p == pytest.approx(mcnemar_exact(only_before, only_after), rel=1e-9)


@pytest.mark.parametrize("seeds", [(2, 2), (3, 3), (4, 1), (8, 8)])
@pytest.mark.parametrize("gain", [0.0, 0.1, -0.15])
def test_interval_and_p_never_contradict_each_other(seeds, gain):
    rng = random.Random(f"{seeds} {gain}")
    for count in (1, 2, 6, 12, 40, 150):
        differences = drawn(rng, count, seeds=seeds, gain=gain)
        mean, found = sum(differences) / count, sign_flip(differences)
        low, high = found.ci95
        assert -1 <= low <= mean + 1e-9
        assert mean - 1e-9 <= high <= 1
        assert (low > 0) == (found.p < 0.05 and mean > 0)
        assert (high < 0) == (found.p < 0.05 and mean < 0)


def test_interval_of_many_items_is_the_normal_one():
    rng = random.Random(0)
    differences = [rng.choice((1, 0, 0, 1 / 3, -1 / 3)) for _ in range(900)]
    mean = sum(differences) / 900
    error = (sum((one - mean) ** 2 for one in differences) / 900 / 900) ** 0.5
    assert sign_flip(differences).ci95 == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.1 * error)


def test_interval_covers_the_true_gain_at_its_level(monkeypatch):
    monkeypatch.setattr("ray_jobs.statistics.NUM_DRAWS", 4000)
    rng = random.Random(0)
    held = 0
    for _ in range(200):
        differences = []
        for _ in range(30):
            rate = 0.9 * rng.betavariate(0.5, 0.5)
            differences.append(sum((rng.random() < rate + 0.1) - (rng.random() < rate) for _ in range(3)) / 3)
        low, high = sign_flip(differences).ci95
        held += low <= 0.1 <= high
    assert held >= 0.93 * 200
