"""A small known world in which a process reward model (PRM) can mislead.

Three pieces of work, then an answer, in at most six steps. The PRM scores work 0.8, the answer when the work is done
0.9, an answer too early 0.1, and padding (work too many included) whatever is asked for. A policy of one softmax per
amount of work done is trained by policy gradient with the product's own advantages.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

WORK, PAD, ANSWER = range(3)
NEEDED, MAX_STEPS = 3, 6
GROUPS, GROUP_SIZE, UPDATES, RATE = 4, 8, 120, 0.5

Padding = float | Literal["random"]
Credit = Callable[[Sequence[float], Sequence[Sequence[int]], Sequence[Sequence[float]]], list[list[float]]]


def score(action: int, done: int, *, padding: Padding, rng: np.random.Generator) -> float:
    """What the PRM says; `padding` "random" is one that knows nothing."""
    if padding == "random":
        return rng.random()
    if action == ANSWER:
        return 0.9 if done == NEEDED else 0.1
    return 0.8 if action == WORK and done < NEEDED else padding


def roll_out(
    policy: np.ndarray, *, padding: Padding, rng: np.random.Generator
) -> tuple[float, list[tuple[int, int, float]]]:
    """The outcome, and each step as (work done before it, action, score)."""
    steps, done = [], 0
    for draw in rng.random(MAX_STEPS):
        action = int((policy[done].cumsum() < draw).sum())
        steps.append((done, action, score(action, done, padding=padding, rng=rng)))
        if action == ANSWER:
            return float(done == NEEDED), steps
        done = min(done + (action == WORK), NEEDED)
    return 0.0, steps


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def accuracy(policy: np.ndarray) -> float:
    """The exact probability of a right answer."""
    reached, right = np.eye(NEEDED + 1)[0], 0.0
    for _ in range(MAX_STEPS):
        right += reached[NEEDED] * policy[NEEDED, ANSWER]
        worked = reached * policy[:, WORK]
        reached = reached * policy[:, PAD] + np.append(0, worked[:-1])
        reached[NEEDED] += worked[NEEDED]
    return float(right)


def train(advantages_of: Credit, *, padding: Padding, seed: int) -> float:
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
