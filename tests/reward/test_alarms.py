import numpy as np
import pytest

from reward.prm.alarms import CANARY_LIMIT, REJUDGE_MSE_LIMIT, HackingMonitor
from reward.statistics import ranking_facts, rollout_metrics

LEVELS = {"canary": ("prm/canary_max", CANARY_LIMIT), "fresh error": ("prm/rejudge_mse", REJUDGE_MSE_LIMIT)}
"""Alarm -> the metric that it watches, and its bound."""
HEALTHY = {"rollout/solve_rate": 0.5, "prm/sibling_z": 3.0, "prm/canary_max": 0.1, "prm/rejudge_mse": 0.05}


def make_monitor(*, prm_weight=0.5, window=4):
    return HackingMonitor(window, prm_weight)


def observe(monitor, rows, *, first_step=1):
    """Return the names of each step's alarms; a row holds the metrics that differ from a healthy step."""
    return [
        [alarm.name for alarm in monitor.observe(step, HEALTHY | row)]
        for step, row in enumerate(rows, start=first_step)
    ]


def solve_rates(rates):
    return [{"rollout/solve_rate": rate} for rate in rates]


@pytest.mark.parametrize("name", LEVELS)
def test_level_alarm_fires_above_its_bound_and_not_at_it(name):
    metric, bound = LEVELS[name]
    assert observe(make_monitor(window=2), [{metric: bound}] * 2) == [[], []]
    assert observe(make_monitor(window=2), [{metric: bound + 0.001}] * 2) == [[], [name]]
    assert observe(make_monitor(), [{}] * 3 + [{metric: 1.5 * bound}] + [{}] * 3) == [[]] * 7


def test_metric_that_is_measured_once_a_window_is_averaged_over_its_measurements():
    monitor, raised = make_monitor(), []
    for step in range(1, 13):
        row = {"rollout/solve_rate": 0.5} | ({"prm/canary_max": 0.9} if step in (4, 8) else {})
        raised += [(step, alarm.name) for alarm in monitor.observe(step, row)]
    assert raised == [(4, "canary"), (8, "canary")]


@pytest.mark.parametrize("slope", [0.3, 0.1, 0.03, 0.01, 0.003])
def test_fall_of_the_solve_rate_is_detected_at_any_speed(slope):
    rates = [0.8] * 8 + [max(0.0, 0.8 - slope * step) for step in range(1, 1 + round(0.8 / slope))] + [0.0] * 8
    monitor = make_monitor()
    observe(monitor, solve_rates(rates))
    assert {alarm.name for alarm in monitor.alarms} == {"solve rate"}
    first = monitor.alarms[0].step
    assert 0.15 < 0.8 - sum(rates[first - 4 : first]) / 4 < 0.15 + 3 * slope + 1e-9 or slope > 0.1


def test_fall_is_measured_from_the_best_window_of_the_whole_run():
    rates = [0.1, 0.1, 0.9, 0.9, 0.9, 0.9, *[0.85] * 40, *[0.72] * 8]
    monitor = make_monitor()
    observe(monitor, solve_rates(rates))
    assert {alarm.name for alarm in monitor.alarms} == {"solve rate"}
    assert monitor.alarms[0].step > 46


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_a_constant_solve_rate_is_no_fall(seed):
    """Four groups a step, each all right or all wrong by a coin: windows that differ by 0.25 are common."""
    rng = np.random.default_rng(seed)
    monitor = make_monitor()
    observe(monitor, solve_rates(rng.binomial(4, 0.5, size=400) / 4))
    assert len(monitor.alarms) <= 4
    assert monitor.prm_weight >= 0.125


def test_ranking_fires_where_right_attempts_score_below_wrong_siblings():
    # Four steps of deviation -1.6 are 3.2 below chance, above the bound of 3; of -1.4 they are 2.8.
    assert observe(make_monitor(), [{"prm/sibling_z": -1.6}] * 4) == [[], [], [], ["ranking"]]
    assert observe(make_monitor(), [{"prm/sibling_z": -1.4}] * 8) == [[]] * 8


def test_ranking_is_over_pairs_of_a_group_and_added_up_over_groups():
    inverted = ranking_facts([1.0, 0.0, 0.0], [[0.1], [0.5, 0.7], [0.1]])
    assert (inverted["prm_pairs"], inverted["prm_wins"]) == (2, 0.5)
    assert inverted["prm_wins_variance"] == pytest.approx(2 * 1 * 4 / 12)
    right = ranking_facts([1.0, 0.0], [[0.9, 0.8], [0.1]])
    both = {name: inverted[name] + right[name] for name in right}
    metrics = rollout_metrics({"trajectories": 5, "prm_steps": 7, **both})
    assert metrics["prm/sibling_auroc"] == pytest.approx(1.5 / 3)
    assert metrics["prm/sibling_z"] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("outcomes", "scores", "pairs", "wins", "variance"),
    [
        # No attempt is solved. By chance three different scores have 0, 1, 1, 2, 2 or 3 pairs in order.
        ([0.0, 0.5, 0.9], [[0.9], [0.5], [0.1]], 3, 0.0, 11 / 12),
        ([0.2, 0.5, 0.5], [[0.9], [0.1], [0.9]], 2, 0.5, 2 * 1 * 4 / 12),
        ([0.1 + 0.2, 0.3], [[0.9], [0.1]], 0, 0.0, 0.0),
        ([1.0, None, 0.0], [[0.5], [0.1], [None, 0.2]], 0, 0.0, 0.0),
        ([1.0, 1.0], [[0.5], [0.1]], 0, 0.0, 0.0),
    ],
    ids=["three outcomes", "two outcomes", "equal but for rounding", "missing outcome or score", "one outcome"],
)
def test_ranking_of_partial_outcomes(outcomes, scores, pairs, wins, variance):
    counts = ranking_facts(outcomes, scores)
    assert counts == {"prm_pairs": pairs, "prm_wins": wins, "prm_wins_variance": pytest.approx(variance)}


def test_alarm_pauses_for_a_window_of_steps_without_silencing_another():
    rows = [{"prm/canary_max": 0.9}] * 9
    assert observe(make_monitor(window=4), rows) == [[], [], [], ["canary"], [], [], [], ["canary"], []]
    monitor = make_monitor(window=4)
    observe(monitor, rows[:4])
    assert observe(monitor, [{"prm/canary_max": 0.9, "prm/rejudge_mse": 0.9}], first_step=5) == [["fresh error"]]


def test_every_alarm_halves_the_weight():
    monitor = make_monitor(prm_weight=0.8, window=2)
    noisy = {"prm/canary_max": 0.9, "prm/rejudge_mse": 0.9}
    assert observe(monitor, [noisy] * 3) == [[], ["canary", "fresh error"], []]
    assert [alarm.prm_weight for alarm in monitor.alarms] == pytest.approx([0.4, 0.2])


def test_weight_recovers_after_quiet_steps_twice_as_slowly_with_every_alarm_up_to_its_initial_value():
    monitor, bad, weights = make_monitor(window=2), {"prm/canary_max": 0.45}, []
    for step, row in enumerate([bad] * 2 + [{}] * 4 + [bad] * 2 + [{}] * 48):
        monitor.observe(step, HEALTHY | row)
        weights.append(monitor.prm_weight)
    assert weights == [0.5] + [0.25] * 4 + [0.5] * 2 + [0.25] * 8 + [0.5] * 41
