"""A process reward model that likes padding, or knows nothing, must not destroy accuracy."""

from functools import cache
from statistics import fmean

import pytest

from learner.credit import outcome_gated
from reward.prm import alarms
from reward.prm.alarms import HackingMonitor
from tests.reward.padding_world import monitored, train

SEEDS = range(3)


def gated(weight):
    return lambda outcomes, scores: outcome_gated(outcomes, scores, weight=weight)


@cache
def outcome_only():
    return fmean(train(gated(0), padding=0.85, seed=seed) for seed in SEEDS)


def accuracies(advantages_of, *, padding):
    return [train(advantages_of, padding=padding, seed=seed) for seed in SEEDS]


@pytest.mark.parametrize("padding", [0.3, 0.6, 0.85, "random"])
def test_gated_credit_keeps_the_accuracy_of_outcome_only(padding):
    assert min(accuracies(gated(0.5), padding=padding)) > outcome_only() - 0.03 > 0.92


def test_weight_without_alarms_fails_where_padding_scores_above_everything():
    """The alarms are needed beyond this limit of the gate."""
    assert max(*accuracies(gated(0.5), padding=0.95), *accuracies(gated(0.5), padding=1.0)) < 0.1
    assert min(accuracies(gated(0.25), padding=1.0)) > outcome_only() - 0.03


def watched(*, padding, seed, updates=120):
    monitor = HackingMonitor(4, 0.5)
    return train(monitored(monitor), padding=padding, seed=seed, updates=updates), monitor


@pytest.mark.parametrize("padding", [0.95, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_alarms_keep_the_accuracy_where_padding_scores_above_everything(padding, seed):
    accuracy, monitor = watched(padding=padding, seed=seed)
    assert accuracy > 0.9
    assert monitor.alarms[0].name == "ranking"


@pytest.mark.parametrize("padding", [0.6, 0.85])
@pytest.mark.parametrize("seed", range(5))
def test_healthy_run_raises_no_alarm(padding, seed):
    accuracy, monitor = watched(padding=padding, seed=seed)
    assert accuracy > 0.9
    assert monitor.alarms == []


def test_weight_that_returns_does_not_take_over_again():
    accuracy, monitor = watched(padding=1.0, seed=0, updates=300)
    assert accuracy > 0.9
    assert monitor.prm_weight > monitor.alarms[-1].prm_weight


@pytest.mark.parametrize("padding", [0.95, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_solve_rate_alone_detects_a_takeover(padding, seed, monkeypatch):
    monkeypatch.setattr(alarms, "RANKING_DEVIATIONS", 1e9)
    monitor = HackingMonitor(4, 0.5)
    assert train(monitored(monitor), padding=padding, seed=seed) > 0.9
    assert {alarm.name for alarm in monitor.alarms} == {"solve rate"}
