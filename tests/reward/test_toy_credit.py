"""A process reward model (PRM) that likes padding, or knows nothing, must not destroy accuracy.

The world is small and known. Three pieces of work, then an answer, in at most six steps. The PRM scores work 0.8, the
answer when the work is done 0.9, an answer too early 0.1, and padding (work too many included) whatever is asked for.
A policy of one softmax per amount of work done is trained by policy gradient with the product's own advantages.
"""

from functools import cache
from statistics import fmean

import numpy as np
import pytest

from learner.credit import group_normalized, outcome_gated

SEEDS = range(3)
WORK, PAD, ANSWER = range(3)
NEEDED, MAX_STEPS = 3, 6
GROUPS, GROUP_SIZE, UPDATES, RATE = 4, 8, 120, 0.5


def score(action, done, *, padding, rng):
    """What the PRM says; `padding` "random" is one that knows nothing."""
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
    return float(right)


def train(advantages_of, *, padding, seed):
    """The accuracy after training; `advantages_of(outcomes, actions, scores)` credits the steps of one of the `GROUPS`
    groups of an update."""
    rng = np.random.default_rng(seed)
    logits = np.zeros((NEEDED + 1, 3))
    for _ in range(UPDATES):
        policy, gradient, num_steps = softmax(logits), np.zeros_like(logits), 0
        for _ in range(GROUPS):
            group = [roll_out(policy, padding=padding, rng=rng) for _ in range(GROUP_SIZE)]
            actions, scores = ([[step[place] for step in steps] for _, steps in group] for place in (1, 2))
            credit = advantages_of([outcome for outcome, _ in group], actions, scores)
            for (_, steps), advantages in zip(group, credit, strict=True):
                num_steps += len(steps)
                for (done, action, _), advantage in zip(steps, advantages, strict=True):
                    gradient[done] += advantage * (np.eye(3)[action] - policy[done])
        logits += RATE * gradient / num_steps * (NEEDED + 1)
    return accuracy(softmax(logits))


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
