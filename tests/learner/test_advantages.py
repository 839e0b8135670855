import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner import credit
from learner.credit import group_centered, group_normalized

GOLDEN = Path(__file__).parents[1] / "golden" / "values.json"
REWARDS = st.lists(st.one_of(st.none(), st.floats(-10, 10)), max_size=12)


def test_golden_groups_are_reproduced(monkeypatch):
    monkeypatch.setattr(credit, "MIN_STD", 0.0)
    for case in json.loads(GOLDEN.read_text())["group_advantages"]:
        found = group_normalized(case["rewards"])
        expected = [value or 0.0 for value in case["adv_ddof1_eps1e6_verl"]]
        assert found == pytest.approx(expected, abs=1e-9), case["name"]


@pytest.mark.parametrize("value", [0.1, 0.35, 0.7, 1.0])
def test_equal_rewards_never_become_rounding_noise_blown_up(value):
    for size in (3, 6, 7, 16):
        assert group_normalized([value] * size) == [0.0] * size


def test_spread_below_min_std_is_no_signal(monkeypatch):
    assert group_normalized([0.5, 0.5005, 0.5, 0.4995]) == [0.0] * 4
    monkeypatch.setattr(credit, "MIN_STD", 0.0)
    assert group_normalized([0.5, 0.5005, 0.5, 0.4995])[1] == pytest.approx(1.2217522019)


def test_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="finite"):
        group_normalized([1.0, float("nan")])


@given(REWARDS)
def test_advantages_of_a_group_add_up_to_zero(rewards):
    assert math.fsum(group_normalized(rewards)) == pytest.approx(0.0, abs=1e-6)


@given(REWARDS, st.randoms(use_true_random=False))
def test_permuting_the_trajectories_permutes_the_advantages(rewards, random):
    order = random.sample(range(len(rewards)), len(rewards))
    there = group_normalized(rewards)
    assert group_normalized([rewards[index] for index in order]) == [there[index] for index in order]


def test_centered_advantages_are_the_distance_from_the_mean_whatever_the_deviation():
    assert group_centered([1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]
    assert group_centered([1, None, 0.5]) == [0.25, 0.0, -0.25]
    assert group_centered([0.7, 0.7, 0.7]) == group_centered([0.5, 0.5005, 0.4995]) == [0.0] * 3
    assert group_centered([0.7]) == [0.0]
