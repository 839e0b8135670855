"""A process reward model that likes padding, or knows nothing, must not destroy accuracy.

A toy problem: three pieces of work, then an answer, in at most six steps. The model scores work 0.8, the answer when
the work is done 0.9, an answer too early 0.1, and padding (work too many included) whatever the test says. A policy
of one softmax per amount of work done is trained by policy gradient with our own advantages.
"""

from functools import cache
from statistics import fmean

import numpy as np
import pytest

from learner.advantages import outcome_gated, pooled

WORK, PAD, ANSWER = range(3)
NEEDED, MAX_STEPS = 3, 6
GROUPS, GROUP_SIZE, UPDATES, RATE = 4, 8, 120, 0.5
SEEDS = range(3)


def score(action, done, *, padding, rng):
    """What the process reward model says; `padding` "random" is one that knows nothing."""
    if padding == "random":
        return rng.random()
    if action == ANSWER:
        return 0.9 if done == NEEDED else 0.1
    return 0.8 if action == WORK and done < NEEDED else padding


def roll_out(policy, *, padding, rng):
    """The outcome, and each step as (work done before it, action, score)."""
    steps, done = [], 0
    for draw in rng.random(MAX_STEPS):
        action = int((policy[done].cumsum() < draw).sum())
        steps.append((done, action, score(action, done, padding=padding, rng=rng)))
        if action == ANSWER:
            return float(done == NEEDED), steps
        done = min(done + (action == WORK), NEEDED)
    return 0.0, steps


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def accuracy(policy):
    """The exact probability of a right answer."""
    reached, right = np.eye(NEEDED + 1)[0], 0.0
    for _ in range(MAX_STEPS):
        right += reached[NEEDED] * policy[NEEDED, ANSWER]
        worked = reached * policy[:, WORK]
        reached = reached * policy[:, PAD] + np.append(0, worked[:-1])
        reached[NEEDED] += worked[NEEDED]
    return right


def train(advantages_of, *, padding, seed):
    """The accuracy after training; `advantages_of(outcomes, scores)` credits the steps of one group."""
    rng = np.random.default_rng(seed)
    logits = np.zeros((NEEDED + 1, 3))
    for _ in range(UPDATES):
        policy, gradient, num_steps = softmax(logits), np.zeros_like(logits), 0
        for _ in range(GROUPS):
            group = [roll_out(policy, padding=padding, rng=rng) for _ in range(GROUP_SIZE)]
            scores = [[step[2] for step in steps] for _, steps in group]
            credit = advantages_of([outcome for outcome, _ in group], scores)
            for (_, steps), advantages in zip(group, credit, strict=True):
                num_steps += len(steps)
                for (done, action, _), advantage in zip(steps, advantages, strict=True):
                    gradient[done] += advantage * (np.eye(3)[action] - policy[done])
        logits += RATE * gradient / num_steps * (NEEDED + 1)
    return float(accuracy(softmax(logits)))


def gated(weight):
    return lambda outcomes, scores: outcome_gated(outcomes, scores, weight=weight)


def prm_only(outcomes, scores):
    """The normalised scores of the steps still to come (process supervision, arXiv 2402.03300, section 4.1.3)."""
    return [list(np.cumsum(steps[::-1])[::-1]) for steps in pooled(scores)]


@cache
def outcome_only():
    return fmean(train(gated(0), padding=0.85, seed=seed) for seed in SEEDS)


def accuracies(advantages_of, *, padding):
    return [train(advantages_of, padding=padding, seed=seed) for seed in SEEDS]


def test_accuracy_of_the_untrained_policy_is_as_computed_by_hand():
    # The third work comes at step k after k - 3 paddings in any places: comb(k - 1, 2) / 3**k. From then on only the
    # answer (1 / 3) ends it; everything else (2 / 3) waits.
    third = {3: 1 / 27, 4: 3 / 81, 5: 6 / 243}
    expected = sum(third[k] * (2 / 3) ** wait / 3 for k in third for wait in range(MAX_STEPS - k))
    assert accuracy(softmax(np.zeros((NEEDED + 1, 3)))) == pytest.approx(expected)


def test_outcome_alone_solves_the_toy():
    assert outcome_only() > 0.95


@pytest.mark.parametrize("padding", [0.3, 0.6, 0.85, "random"])
def test_gated_credit_keeps_the_accuracy_of_outcome_only(padding):
    assert min(accuracies(gated(0.5), padding=padding)) > outcome_only() - 0.03


@pytest.mark.parametrize("padding", [0.3, 0.6])
def test_prm_alone_is_fine_where_padding_scores_below_work(padding):
    assert min(accuracies(prm_only, padding=padding)) > outcome_only() - 0.03


def test_prm_alone_collapses_where_padding_scores_above_work():
    """What the gate is for: without it the policy pads and never answers."""
    assert max(accuracies(prm_only, padding=0.85)) < 0.05


def test_weight_that_an_alarm_has_halved_holds_where_padding_scores_above_everything():
    """The limit of the gate: at weight 0.5 such a scorer pulls the policy down before mixed groups are common."""
    assert max(accuracies(gated(0.5), padding=1.0)) < 0.1
    assert min(accuracies(gated(0.25), padding=1.0)) > outcome_only() - 0.03
