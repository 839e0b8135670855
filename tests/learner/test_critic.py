"""The critic, and the credit of groups in which no attempt is right."""

import math

import numpy as np
import pytest
import torch

from learner.checkpoint import load_checkpoint, save_checkpoint
from learner.credit import (
    GAIN_CLIP,
    GAIN_FLOOR,
    GAIN_WEIGHT,
    UNIFORM,
    assign_wrong_credit,
    wrong_advantages,
    wrong_share,
)
from learner.critic import Critic
from learner.packing import group_samples
from rollout.types import Completion, Group, Reward, Trajectory, Turn
from tests.learner.tiny import make_learner, save_tiny_model
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


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    return make_learner(save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3"))


def test_critic_learns_which_states_end_right_and_says_nothing_before(learner):
    critic = Critic(learner.policy, microbatch_tokens=16)
    group = make_group(make_attempt("a", 1.0, GOOD), make_attempt("b", 0.0, BAD), make_attempt("c", None, BAD))
    before = {name: value.clone() for name, value in learner.policy.adapter_state().items()}
    assert critic.values([group]) == {"a": (0.0,), "b": (0.0,)}
    values = critic.values([group])
    assert values["a"][0] > 0.9 > 0.1 > values["b"][0]
    assert all(torch.equal(value, before[name]) for name, value in learner.policy.adapter_state().items())


def test_critic_continues_from_its_checkpoint(learner, tmp_path):
    group = make_group(make_attempt("a", 1.0, GOOD, BAD), make_attempt("b", 0.0, BAD))
    learner.critic = Critic(learner.policy, microbatch_tokens=16)
    learner.values([group])
    saved = save_checkpoint(learner, tmp_path, keep=1)
    values = learner.values([group])
    learner.critic = Critic(learner.policy, microbatch_tokens=16)
    load_checkpoint(learner, saved)
    assert learner.values([group]) == values


def test_steps_of_wrong_attempts_get_their_gain_in_value():
    group = make_group(make_attempt("a", 0.0, GOOD, BAD, BAD), make_attempt("b", 0.0, GOOD))
    gains = [0.3, -0.4, -0.2, -0.3]
    scale = math.sqrt(sum(gain**2 for gain in gains) / 4)
    found = wrong_advantages(group, {"a": (0.3, 0.6, 0.2), "b": (0.3,)})
    assert found[0] + found[1] == pytest.approx([GAIN_WEIGHT * gain / scale for gain in gains])


def test_small_gains_stay_small_and_large_ones_are_bounded():
    group = make_group(make_attempt("a", 0.0, GOOD), make_attempt("b", 0.0, *[BAD] * 9))
    assert wrong_advantages(group, {"a": (0.03,), "b": (0.0,) * 9})[0] == pytest.approx(
        [-GAIN_WEIGHT * 0.03 / GAIN_FLOOR]
    )
    little = tuple(0.01 * left for left in range(9, 0, -1))
    assert wrong_advantages(group, {"a": (1.0,), "b": little})[0] == [-GAIN_WEIGHT * GAIN_CLIP]


def test_without_a_critic_all_steps_get_the_same_and_untrained_ones_nothing():
    unscored, frozen = make_attempt("b", None, GOOD), make_attempt("c", 0.0, GOOD, trainable=False)
    group = make_group(make_attempt("a", 0.0, GOOD, BAD), unscored, frozen)
    assert wrong_advantages(group, {}) == [[UNIFORM, UNIFORM], [0.0], [0.0]]


def test_wrong_attempts_weigh_at_most_half_of_the_others():
    right, wrong = make_group(make_attempt("a", 1.0, GOOD)), make_group(*(make_attempt(n, 0.0, BAD) for n in "bcde"))
    right.trajectories[0].turns[0].advantage = 0.7
    assign_wrong_credit(wrong, {})
    samples = [group_samples(group, temperature=1.0) for group in (right, wrong)]
    share = wrong_share(*samples)
    mass = [sum(np.abs(one.advantages).sum() for one in some) for some in samples]
    assert share * mass[1] == pytest.approx(0.5 * mass[0])
    assert wrong_share(samples[0], []) == 1.0
    assert wrong_share([], samples[1]) == 0.0
