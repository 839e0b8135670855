import numpy as np
import pytest

from configs.reward import AlarmConfig
from reward.prm.alarms import HackingMonitor
from reward.statistics import RolloutStatistics, ranking_statistics

LEVELS = {
    "canary": ("prm/canary_max", "canary", 0.3),
    "fresh error": ("prm/rejudge_mse", "rejudge_mse", 0.2),
}
"""Alarm -> the metric it watches, its setting and that setting's default."""


def make_metrics(*, solved=0.5, **others):
    """A healthy step; `others` are metrics with `/` written as `__`."""
    return {
        "rollout/solve_rate": solved,
        "prm/sibling_z": 3.0,
        "prm/canary_max": 0.1,
        "prm/rejudge_mse": 0.05,
        **{name.replace("__", "/"): value for name, value in others.items()},
    }


def make_monitor(*, prm_weight=0.5, **config):
    return HackingMonitor(AlarmConfig(**config), prm_weight)


def observe(monitor, rows, *, first_step=1):
    """The names of each step's alarms."""
    return [[alarm.name for alarm in monitor.observe(step, row)] for step, row in enumerate(rows, start=first_step)]


def steps_of(rates):
    return [make_metrics(solved=rate) for rate in rates]


@pytest.mark.parametrize("name", LEVELS)
def test_level_alarm_fires_above_its_bound_and_not_at_it(name):
    metric, setting, bound = LEVELS[name]
    assert getattr(AlarmConfig(), setting) == bound
    assert observe(make_monitor(window=2), [make_metrics() | {metric: bound}] * 2) == [[], []]
    assert observe(make_monitor(window=2), [make_metrics() | {metric: bound + 0.001}] * 2) == [[], [name]]
    config = {setting: bound / 2, "window": 2}
    assert observe(make_monitor(**config), [make_metrics() | {metric: bound}] * 2) == [[], [name]]


@pytest.mark.parametrize("name", LEVELS)
def test_level_alarm_says_its_value_and_its_bound(name):
    metric, _, bound = LEVELS[name]
    monitor = make_monitor(window=2)
    observe(monitor, [make_metrics() | {metric: 0.987}] * 2, first_step=6)
    (alarm,) = monitor.alarms
    assert (alarm.step, alarm.name) == (7, name)
    assert alarm.message == f"{metric} over the last 2 steps is 0.987, above its bound {bound:g}"


@pytest.mark.parametrize("name", LEVELS)
def test_one_step_above_the_bound_among_quiet_ones_raises_nothing(name):
    metric, _, bound = LEVELS[name]
    rows = [make_metrics()] * 3 + [make_metrics() | {metric: 1.5 * bound}] + [make_metrics()] * 3
    assert observe(make_monitor(), rows) == [[]] * 7


def test_metric_that_is_taken_once_a_window_is_judged_where_it_is_there():
    rows = [{"rollout/solve_rate": 0.5} for _ in range(12)]
    rows[3]["prm/canary_max"] = rows[7]["prm/canary_max"] = 0.9
    raised = observe(make_monitor(), rows)
    assert raised == [[], [], [], ["canary"], [], [], [], ["canary"], [], [], [], []]


@pytest.mark.parametrize("slope", [0.3, 0.1, 0.03, 0.01, 0.003])
def test_fall_of_the_solve_rate_is_seen_however_slow_it_is(slope):
    rates = [0.8] * 8 + [max(0.0, 0.8 - slope * step) for step in range(1, 1 + round(0.8 / slope))] + [0.0] * 8
    monitor = make_monitor()
    observe(monitor, steps_of(rates))
    assert {alarm.name for alarm in monitor.alarms} == {"solve rate"}
    first = monitor.alarms[0].step
    assert 0.15 < 0.8 - sum(rates[first - 4 : first]) / 4 < 0.15 + 3 * slope + 1e-9 or slope > 0.1


def test_fall_is_measured_from_the_best_window_of_the_whole_run():
    rates = [0.1, 0.1, 0.9, 0.9, 0.9, 0.9, *[0.85] * 40, *[0.72] * 8]
    monitor = make_monitor()
    observe(monitor, steps_of(rates))
    assert [alarm.name for alarm in monitor.alarms] == ["solve rate"] * len(monitor.alarms) != []
    assert monitor.alarms[0].step > 46
    assert "0.9, and its bound is 0.15" in monitor.alarms[0].message


def test_fall_above_its_bound_and_not_at_it():
    assert observe(make_monitor(), steps_of([0.75] * 8 + [0.5] * 8), first_step=1).count(["solve rate"]) == 2
    assert observe(make_monitor(solve_rate_fall=0.25), steps_of([0.75] * 8 + [0.5] * 8)) == [[]] * 16


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_a_solve_rate_that_stays_is_no_fall(seed):
    """Four groups a step, each all right or all wrong as a coin says: windows that differ by 0.25 are common."""
    rng = np.random.default_rng(seed)
    monitor = make_monitor()
    observe(monitor, steps_of(rng.binomial(4, 0.5, size=400) / 4))
    assert len(monitor.alarms) <= 4
    assert monitor.prm_weight >= 0.125


def test_solve_rate_that_rises_or_stays_raises_nothing():
    rows = steps_of([0.1 + 0.04 * step for step in range(20)] + [0.9] * 20)
    monitor = make_monitor()
    assert observe(monitor, rows) == [[]] * 40
    assert (monitor.prm_weight, monitor.alarms) == (0.5, [])


def test_ranking_fires_where_right_attempts_score_below_wrong_siblings():
    low = make_metrics(prm__sibling_z=-1.6)
    assert observe(make_monitor(), [low] * 4) == [[], [], [], ["ranking"]]
    assert observe(make_monitor(), [make_metrics(prm__sibling_z=-1.4)] * 8) == [[]] * 8
    assert observe(make_monitor(ranking_deviations=4.0), [low] * 8) == [[]] * 8


def test_ranking_alarm_says_its_value_and_its_bound():
    monitor = make_monitor()
    observe(monitor, [make_metrics(prm__sibling_z=-2.0)] * 4)
    assert "4.0 standard deviations below chance, and its bound is 3" in monitor.alarms[0].message


def test_ranking_is_taken_over_pairs_of_a_group_and_added_up_over_groups():
    upside_down = ranking_statistics([1.0, 0.0, 0.0], [[0.1], [0.5, 0.7], [0.1]])
    assert (upside_down.prm_pairs, upside_down.prm_wins) == (2, 0.5)
    assert upside_down.prm_wins_variance == pytest.approx(2 * 1 * 4 / 12)
    right = ranking_statistics([1.0, 0.0], [[0.9, 0.8], [0.1]])
    metrics = (RolloutStatistics(trajectories=5, prm_steps=7) + upside_down + right).metrics()
    assert metrics["prm/sibling_auroc"] == pytest.approx(1.5 / 3)
    assert metrics["prm/sibling_z"] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("outcomes", "scores", "pairs", "wins", "variance"),
    [
        # No attempt is solved. The numbers of pairs in order that three different scores have by chance are 0, 1, 1,
        # 2, 2 and 3.
        ([0.0, 0.5, 0.9], [[0.9], [0.5], [0.1]], 3, 0.0, 11 / 12),
        ([0.2, 0.5, 0.5], [[0.9], [0.1], [0.9]], 2, 0.5, 2 * 1 * 4 / 12),
        ([0.1 + 0.2, 0.3], [[0.9], [0.1]], 0, 0.0, 0.0),
    ],
    ids=["three outcomes", "two outcomes", "one outcome but for rounding"],
)
def test_of_two_attempts_whose_score_is_a_part_the_better_one_is_ranked(outcomes, scores, pairs, wins, variance):
    found = ranking_statistics(outcomes, scores)
    assert (found.prm_pairs, found.prm_wins) == (pairs, wins)
    assert found.prm_wins_variance == pytest.approx(variance)


def test_ranking_leaves_out_attempts_without_outcome_or_score_and_groups_without_a_pair():
    assert ranking_statistics([1.0, None, 0.0], [[0.5], [0.1], [None, 0.2]]).prm_pairs == 0
    assert ranking_statistics([1.0, 1.0], [[0.5], [0.1]]).prm_pairs == 0
    assert "prm/sibling_auroc" not in RolloutStatistics(trajectories=2).metrics()


def test_alarm_rests_for_a_window_of_steps():
    rows = [make_metrics(prm__canary_max=0.9)] * 9
    assert observe(make_monitor(window=4), rows) == [[], [], [], ["canary"], [], [], [], ["canary"], []]


def test_alarm_that_rests_does_not_silence_another():
    monitor = make_monitor(window=4)
    assert observe(monitor, [make_metrics(prm__canary_max=0.9)] * 4)[3] == ["canary"]
    both = make_metrics(prm__canary_max=0.9, prm__rejudge_mse=0.9)
    assert observe(monitor, [both], first_step=5) == [["fresh error"]]


def test_every_alarm_lowers_the_weight_by_the_factor():
    monitor = make_monitor(prm_weight=0.8, factor=0.25, window=2)
    noisy = make_metrics(prm__canary_max=0.9, prm__rejudge_mse=0.9)
    assert observe(monitor, [noisy] * 3) == [[], ["canary", "fresh error"], []]
    assert [alarm.prm_weight for alarm in monitor.alarms] == pytest.approx([0.2, 0.05])
    assert monitor.prm_weight == pytest.approx(0.05)


def test_weight_returns_after_quiet_steps_twice_as_slowly_with_every_alarm():
    monitor = make_monitor(window=2)
    bad, good = make_metrics(prm__canary_max=0.45), make_metrics()
    rows = [bad] * 2 + [good] * 4 + [bad] * 2 + [good] * 8
    weights = []
    for step, row in enumerate(rows):
        monitor.observe(step, row)
        weights.append(monitor.prm_weight)
    assert weights == [0.5] + [0.25] * 4 + [0.5] * 2 + [0.25] * 8 + [0.5]


def test_weight_never_rises_above_where_it_began():
    monitor = make_monitor(window=2)
    observe(monitor, [make_metrics(prm__canary_max=0.9)] * 2 + [make_metrics()] * 40)
    assert monitor.prm_weight == 0.5


def test_factor_zero_switches_the_prm_off_for_good():
    monitor = make_monitor(factor=0, window=2)
    observe(monitor, [make_metrics(prm__canary_max=0.9)] * 3 + [make_metrics()] * 99)
    assert monitor.prm_weight == 0


def test_metrics_that_were_not_taken_raise_none():
    assert observe(make_monitor(window=2), [{"rollout/turns": 0.0}] * 9) == [[]] * 9


def test_step_without_any_score_reports_no_mean_score():
    assert "prm/score" not in RolloutStatistics(trajectories=1, turns=2, prm_unscored=2).metrics()
