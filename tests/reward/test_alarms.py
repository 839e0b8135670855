import pytest

from configs.reward import AlarmConfig
from reward.alarms import HackingMonitor
from reward.statistics import RolloutStatistics

LEVELS = {
    "repeats": ("rollout/repeat_share", "repeat_share", 0.3),
    "saturation": ("prm/saturated_share", "saturated_share", 0.95),
    "canary": ("prm/canary_max", "canary", 0.3),
    "fresh error": ("prm/rejudge_mse", "rejudge_mse", 0.15),
}
"""Alarm -> the metric it watches, its setting and that setting's default."""


def make_metrics(*, solved=0.5, score=0.5, turns=2.0, length=0.125, **others):
    """A healthy step; `others` are named by their alarm's metric with `/` written as `__`."""
    return {
        "rollout/solve_rate": solved,
        "rollout/turns": turns,
        "rollout/repeat_share": 0.1,
        "prm/score": score,
        "prm/length_correlation": length,
        "prm/saturated_share": 0.3,
        "prm/canary_max": 0.1,
        "prm/rejudge_mse": 0.05,
        **{name.replace("__", "/"): value for name, value in others.items()},
    }


def make_monitor(*, prm_weight=0.5, **config):
    return HackingMonitor(AlarmConfig(**config), prm_weight)


def observe(monitor, rows, *, first_step=1):
    """The names of each step's alarms."""
    return [[alarm.name for alarm in monitor.observe(step, row)] for step, row in enumerate(rows, start=first_step)]


def two_windows(old, new, *, window=2):
    return [make_metrics(**old)] * window + [make_metrics(**new)] * window


def alarms_of(old, new, **config):
    """The alarms of the first step at which two windows can be compared; steps before it raise none."""
    monitor = make_monitor(window=2, **config)
    *before, last = observe(monitor, two_windows(old, new))
    assert before == [[], [], []]
    return last


@pytest.mark.parametrize("name", LEVELS)
def test_level_alarm_fires_above_its_bound_and_not_at_it(name):
    metric, setting, bound = LEVELS[name]
    assert getattr(AlarmConfig(), setting) == bound
    assert observe(make_monitor(), [make_metrics() | {metric: bound}]) == [[]]
    assert observe(make_monitor(), [make_metrics() | {metric: bound + 0.001}]) == [[name]]
    assert observe(make_monitor(**{setting: bound / 2}), [make_metrics() | {metric: bound}]) == [[name]]


@pytest.mark.parametrize("name", LEVELS)
def test_level_alarm_says_its_value_and_its_bound(name):
    metric, _, bound = LEVELS[name]
    (alarm,) = make_monitor().observe(7, make_metrics() | {metric: 0.987})
    assert (alarm.step, alarm.name) == (7, name)
    assert alarm.message == f"{metric} is 0.987, above its bound {bound:g}"


def test_divergence_fires_where_the_score_rises_and_the_solve_rate_does_not_follow():
    assert alarms_of({"score": 0.25}, {"score": 0.5}) == ["divergence"]
    assert alarms_of({"score": 0.25}, {"score": 0.5, "solved": 0.53}) == ["divergence"]
    assert alarms_of({"score": 0.25}, {"score": 0.5, "solved": 0.2}) == ["divergence"]


def test_divergence_rests_where_the_solve_rate_follows_by_a_fifth():
    assert alarms_of({"score": 0.25}, {"score": 0.5, "solved": 0.56}) == []


def test_divergence_fires_above_its_bound_and_not_at_it():
    assert alarms_of({"score": 0.25}, {"score": 0.375}, score_rise=0.125) == []
    assert alarms_of({"score": 0.25}, {"score": 0.376}, score_rise=0.125) == ["divergence"]


def test_falling_score_is_no_divergence():
    assert alarms_of({"score": 0.9}, {"score": 0.1, "solved": 0.1}) == []


def test_steps_alarm_fires_where_trajectories_grow_and_solve_no_more():
    assert alarms_of({"turns": 2.0}, {"turns": 3.25}) == ["steps"]
    assert alarms_of({"turns": 2.0}, {"turns": 3.25, "solved": 0.4}) == ["steps"]


def test_steps_alarm_rests_at_its_bound_and_where_the_solve_rate_rises():
    assert alarms_of({"turns": 2.0}, {"turns": 3.0}) == []
    assert alarms_of({"turns": 2.0}, {"turns": 3.25, "solved": 0.51}) == []


def test_length_alarm_fires_where_score_and_length_correlate_more_and_solve_no_more():
    assert alarms_of({"length": -0.125}, {"length": 0.25}) == ["length"]
    assert alarms_of({"length": -0.125}, {"length": 0.25, "solved": 0.4}) == ["length"]


def test_length_alarm_rests_at_its_bound_and_where_the_solve_rate_rises():
    assert alarms_of({"length": -0.125}, {"length": 0.25}, length_correlation_rise=0.375) == []
    assert alarms_of({"length": -0.125}, {"length": 0.25, "solved": 0.51}) == []


def test_correlation_of_score_and_length_that_does_not_rise_is_no_alarm_however_high():
    assert alarms_of({"length": 0.95}, {"length": 0.95}) == []
    assert alarms_of({"length": 0.95}, {"length": -0.5}) == []


def test_trends_compare_one_window_with_the_one_before_it():
    """A slow rise of 0.02 a step is 0.08 over windows of 4 and 0.16 over windows of 8."""
    rows = [make_metrics(score=0.1 + 0.02 * step) for step in range(16)]
    assert observe(make_monitor(window=4), rows) == [[]] * 16
    assert observe(make_monitor(window=8), rows) == [[]] * 15 + [["divergence"]]


@pytest.mark.parametrize(
    ("old", "new", "values"),
    [
        ({"score": 0.25}, {"score": 0.5}, ("by 0.25", "by 0")),
        ({"turns": 2.0}, {"turns": 3.5}, ("by 75%", "by 0")),
        ({"length": 0.0}, {"length": 0.5}, ("by 0.5", "by 0")),
    ],
    ids=["divergence", "steps", "length"],
)
def test_trend_alarm_says_its_values(old, new, values):
    monitor = make_monitor(window=2)
    observe(monitor, two_windows(old, new))
    assert all(value in monitor.alarms[0].message for value in values)


@pytest.mark.parametrize(
    ("old", "new", "bound"),
    [
        ({"score": 0.25}, {"score": 0.5}, {"score_rise": 0.137}),
        ({"turns": 2.0}, {"turns": 3.5}, {"turns_rise": 0.137}),
        ({"length": 0.0}, {"length": 0.5}, {"length_correlation_rise": 0.137}),
    ],
    ids=["divergence", "steps", "length"],
)
def test_trend_alarm_says_its_bound(old, new, bound):
    monitor = make_monitor(window=2, **bound)
    observe(monitor, two_windows(old, new))
    assert "0.137" in monitor.alarms[0].message or "14%" in monitor.alarms[0].message


def test_alarm_rests_for_a_window_of_steps():
    rows = [make_metrics(prm__canary_max=0.9)] * 9
    assert observe(make_monitor(window=4), rows) == [["canary"], [], [], [], ["canary"], [], [], [], ["canary"]]


def test_alarm_that_rests_does_not_silence_another():
    monitor = make_monitor(window=4)
    assert observe(monitor, [make_metrics(prm__canary_max=0.9)]) == [["canary"]]
    both = make_metrics(prm__canary_max=0.9, rollout__repeat_share=0.9)
    assert observe(monitor, [both], first_step=2) == [["repeats"]]


def test_every_alarm_lowers_the_weight_by_the_factor():
    monitor = make_monitor(prm_weight=0.8, factor=0.25, window=2)
    (first,) = monitor.observe(1, make_metrics(prm__canary_max=0.9))
    assert first.prm_weight == monitor.prm_weight == pytest.approx(0.2)
    assert monitor.observe(2, make_metrics(prm__canary_max=0.9)) == []
    assert monitor.prm_weight == pytest.approx(0.2)
    second, third = monitor.observe(3, make_metrics(prm__canary_max=0.9, rollout__repeat_share=0.9))
    assert (second.prm_weight, third.prm_weight) == pytest.approx((0.05, 0.0125))
    assert monitor.prm_weight == third.prm_weight
    assert monitor.alarms == [first, second, third]


def test_factor_zero_switches_the_prm_off_for_good():
    monitor = make_monitor(factor=0, window=2)
    observe(monitor, [make_metrics(prm__canary_max=0.9)] * 3 + [make_metrics()] * 9)
    assert monitor.prm_weight == 0


def test_healthy_learning_raises_none():
    """Score and solve rate rise together, and solving takes more steps than giving up."""
    rows = [
        make_metrics(solved=0.1 + 0.04 * step, score=0.3 + 0.03 * step, turns=1.5 + 0.2 * step) for step in range(20)
    ]
    monitor = make_monitor()
    assert observe(monitor, rows) == [[]] * 20
    assert (monitor.prm_weight, monitor.alarms) == (0.5, [])


def test_steady_state_and_metrics_that_were_not_taken_raise_none():
    monitor = make_monitor(window=2)
    unwatched = {"rollout/solve_rate": 0.5, "rollout/turns": 0.0}
    assert observe(monitor, [make_metrics()] * 6 + [unwatched] * 8) == [[]] * 14


def test_silence_of_the_prm_is_no_score_of_zero_that_later_rises():
    """Groups whose scoring failed for a while, then a PRM that says what it said before."""
    silent = dict(make_metrics())
    del silent["prm/score"]
    rows = [make_metrics(score=0.6)] * 2 + [silent] * 2 + [make_metrics(score=0.6)] * 4
    assert observe(make_monitor(window=2), rows) == [[]] * 8


def test_step_without_any_score_reports_no_mean_score():
    assert "prm/score" not in RolloutStatistics(trajectories=1, turns=2, prm_unscored=2).metrics()
