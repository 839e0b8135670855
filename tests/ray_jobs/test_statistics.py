import random
from itertools import product

import pytest

from ray_jobs.statistics import (
    compare_means,
    items_needed,
    mcnemar_exact,
    newcombe_interval,
    sign_flip,
    wilson_interval,
)


@pytest.mark.parametrize(
    # 2 * (1 + 8) / 2**8 for (1, 7).
    ("only_before", "only_after", "p"),
    [(0, 0, 1.0), (3, 3, 1.0), (1, 7, 18 / 256), (0, 5, 2 / 32), (13, 18, None), (0, 217, None), (400, 500, None)],
)
def test_mcnemar_is_the_two_sided_binomial_and_the_sign_flip_of_single_attempts(only_before, only_after, p):
    found = mcnemar_exact(only_before, only_after)
    assert p is None or found == pytest.approx(p)
    differences = [-1.0] * only_before + [1.0] * only_after + [0.0] * 9
    assert sign_flip(differences)[0] == pytest.approx(found, rel=1e-9)


def test_wilson_interval_matches_published_values():
    # Newcombe 1998, table I: 81 of 263, and 0 of 20.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_gain_interval_is_newcombes_method_10():
    """20 tasks: 8 both, 2 only before, 6 only after, 4 neither, so rates 0.5 and 0.7. By hand:
    Wilson (0.29930, 0.70070) and (0.48103, 0.85452); phi = (8*4 - 2*6 - 20/2) / sqrt(10*10*14*6) = 0.10911;
    below^2 = 0.21897^2 - 2*phi*0.21897*0.20070 + 0.20070^2; above^2 = 0.15452^2 - 2*phi*0.15452*0.20070 + 0.20070^2.
    """
    assert newcombe_interval(8, 2, 6, 4) == pytest.approx((0.2 - 0.28043, 0.2 + 0.23956), abs=2e-5)


def test_large_losses_against_small_gains_are_no_gain():
    """40 items a little better, 15 much worse: the mean falls, and no test may call that a significant gain."""
    comparison = compare_means([0.25] * 40 + [1.0] * 15 + [0.5] * 45, [0.5] * 40 + [0.0] * 15 + [0.5] * 45)
    assert (comparison.only_before, comparison.only_after) == (15, 40)
    assert comparison.gain == pytest.approx(-0.05)
    assert comparison.p > 0.05
    assert comparison.ci95[0] < 0 < comparison.ci95[1]


def test_items_needed_follow_the_published_formula():
    # (1.959964 * sqrt(0.3) + 0.841621 * sqrt(0.3 - 0.01))^2 / 0.01 = 233.1, and 1 / 0.1 for the exact test.
    assert items_needed(0.1, 0.3) == 244
    assert items_needed(-0.1, 0.3) == 244
    assert items_needed(0.0, 0.3) is None
    # A gain of 0.1 needs at least a tenth of the tasks to differ.
    assert items_needed(0.1, 0.0) == items_needed(0.1, 0.1)
    # Five tasks that all turn may be chance by the exact test, six may not: 2 / 2^6 < 0.05 < 2 / 2^5.
    assert items_needed(1.0, 1.0) == 6


@pytest.mark.parametrize(("gain", "share"), [(0.1, 0.3), (0.3, 0.5), (0.2, 0.2), (0.7, 0.75)])
def test_items_needed_give_about_the_promised_power(gain, share):
    rng = random.Random(0)
    count = items_needed(gain, share)
    found = 0
    for _ in range(800):
        drawn = rng.choices((1, -1, 0), ((share + gain) / 2, (share - gain) / 2, 1 - share), k=count)
        found += mcnemar_exact(drawn.count(-1), drawn.count(1)) < 0.05
    assert 0.75 < found / 800 < 0.92


# --- sign flips ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("seeds", [(3, 3), (7, 7), (2, 5), (1, 1)])
def test_p_matches_full_enumeration(seeds):
    rng = random.Random(sum(seeds))
    for _ in range(5):
        differences = drawn(rng, 11, seeds=seeds, gain=0.2)
        assert sign_flip(differences)[0] == pytest.approx(by_enumeration(differences), rel=1e-9)


@pytest.mark.parametrize("seeds", [(2, 2), (3, 3), (4, 1), (8, 8)])
@pytest.mark.parametrize("gain", [0.0, 0.1, -0.15])
def test_interval_and_p_never_contradict_each_other(seeds, gain):
    rng = random.Random(f"{seeds} {gain}")
    for count in (1, 2, 6, 12, 40, 150):
        differences = drawn(rng, count, seeds=seeds, gain=gain)
        mean, (p, (low, high)) = sum(differences) / count, sign_flip(differences)
        assert -1 <= low <= mean + 1e-9
        assert mean - 1e-9 <= high <= 1
        assert (low > 0) == (p < 0.05 and mean > 0)
        assert (high < 0) == (p < 0.05 and mean < 0)


def test_interval_covers_the_true_gain_at_its_level(monkeypatch):
    monkeypatch.setattr("ray_jobs.statistics.NUM_DRAWS", 4000)
    rng = random.Random(0)
    held = 0
    for _ in range(200):
        differences = []
        for _ in range(30):
            rate = 0.9 * rng.betavariate(0.5, 0.5)
            differences.append(sum((rng.random() < rate + 0.1) - (rng.random() < rate) for _ in range(3)) / 3)
        _, (low, high) = sign_flip(differences)
        held += low <= 0.1 <= high
    assert held >= 0.93 * 200
