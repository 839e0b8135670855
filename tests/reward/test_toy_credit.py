"""A process reward model that likes padding, or knows nothing, must not destroy accuracy."""

from functools import cache
from statistics import fmean

import pytest

from learner.credit import group_normalized, outcome_gated
from tests.reward.padding_world import train

SEEDS = range(3)


def in_states(weight):
    """Credit with scores compared in their state, which is all that was done before."""

    def credit(outcomes, actions, scores):
        states = [[tuple(steps[:place]) for place in range(len(steps))] for steps in actions]
        return outcome_gated(outcomes, states, scores, weight=weight)

    return credit


def over_the_group(outcomes, actions, scores):
    """Credit with scores compared over all steps of a group, as it must not be."""
    parts = group_normalized(outcomes)
    pooled = iter(group_normalized([score for steps in scores for score in steps]))
    return [
        [(part + 0.5 * next(pooled)) * any(parts) for _ in steps] for part, steps in zip(parts, scores, strict=True)
    ]


@cache
def outcome_only():
    return fmean(train(in_states(0), padding=0.85, seed=seed) for seed in SEEDS)


@pytest.mark.parametrize("padding", [0.3, 0.6, 0.85, 0.95, 1.0, "random"])
def test_scores_in_their_state_keep_the_accuracy_of_outcome_only(padding):
    found = [train(in_states(0.5), padding=padding, seed=seed) for seed in SEEDS]
    assert min(found) > outcome_only() - 0.03 > 0.92


def test_scores_compared_over_a_group_are_taken_over_by_padding():
    assert max(train(over_the_group, padding=1.0, seed=seed) for seed in SEEDS) < 0.1
