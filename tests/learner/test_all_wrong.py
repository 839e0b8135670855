"""The credit of groups in which no attempt is right."""

import numpy as np
import pytest

from learner.credit import ALL_WRONG, assign_wrong_credit, wrong_share
from learner.packing import group_samples
from rollout.types import Completion, Group, Reward, Trajectory, Turn
from tests.reward.test_outcome_reward import TASK

GOOD, BAD = (5, 6, 7), (5, 6, 8)


def make_attempt(name, outcome, *prompts, trainable=True):
    def turn(prompt):
        completion = Completion(
            token_ids=(9, 1), logprobs=(-0.5, -0.5), text="w5", finish_reason="stop", policy_version=0
        )
        return Turn.of(role="planner", prompt_token_ids=prompt, completion=completion, trainable=trainable)

    return Trajectory(
        id=name,
        group_id="g",
        task=TASK,
        turns=tuple(map(turn, prompts)),
        answer="x",
        stop_reason="answered",
        reward=Reward(outcome=outcome, total=outcome),
    )


def make_group(*attempts):
    return Group(id="g", trajectories=attempts)


def test_every_step_of_a_wrong_attempt_loses_and_only_right_ones_before_the_last_gain():
    attempt = make_attempt("a", 0.0, GOOD, BAD, GOOD, BAD)
    for turn, score in zip(attempt.turns, (1.0, 0.5, None, 1.0), strict=True):
        turn.score = score
    group = make_group(attempt, make_attempt("b", 0.0, GOOD))
    assign_wrong_credit(group, weight=0.25)
    # 2 * 0.25 * (2 s - 1) with the mapped scores s of 1 and 0.525.
    gains = [0.5, 0.025, 0.0, 0.0]
    assert [turn.advantage for turn in attempt.turns] == pytest.approx([ALL_WRONG + gain for gain in gains])
    assert [turn.advantage for turn in group.trajectories[1].turns] == [ALL_WRONG]


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_without_scores_all_steps_get_the_same_and_untrained_ones_nothing(weight):
    unscored, frozen = make_attempt("b", None, GOOD), make_attempt("c", 0.0, GOOD, trainable=False)
    group = make_group(make_attempt("a", 0.0, GOOD, BAD), unscored, frozen)
    assign_wrong_credit(group, weight=weight)
    found = [[turn.advantage for turn in one.turns] for one in group.trajectories]
    assert found == [[ALL_WRONG, ALL_WRONG], [0.0], [0.0]]


def test_wrong_attempts_weigh_at_most_half_of_the_others():
    right, wrong = make_group(make_attempt("a", 1.0, GOOD)), make_group(*(make_attempt(n, 0.0, BAD) for n in "bcde"))
    right.trajectories[0].turns[0].advantage = 0.7
    assign_wrong_credit(wrong, weight=0.0)
    samples = [group_samples(group, temperature=1.0) for group in (right, wrong)]
    share = wrong_share(*samples)
    mass = [sum(np.abs(one.advantages).sum() for one in some) for some in samples]
    assert share * mass[1] == pytest.approx(0.5 * mass[0])
    assert wrong_share(samples[0], []) == 1.0
    assert wrong_share([], samples[1]) == 0.0
