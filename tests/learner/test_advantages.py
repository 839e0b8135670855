import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.advantages import group_normalized

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "golden.json"


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden values are not on this machine")
def test_golden_groups_are_reproduced():
    for case in json.loads(GOLDEN.read_text())["group_advantages"]:
        found = group_normalized(case["rewards"], min_std=0.0)
        expected = [value or 0.0 for value in case["adv_ddof1_eps1e6_verl"]]
        assert found == pytest.approx(expected, abs=1e-9), case["name"]


def test_half_right_group_gets_plus_and_minus_one_sample_std():
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert group_normalized([1, 0, 0, 1]) == pytest.approx([expected, -expected, -expected, expected])


def test_unscorable_trajectory_moves_no_statistic_and_gets_zero():
    with_hole = group_normalized([1, 0, None, 1])
    assert with_hole[2] == 0.0
    assert [with_hole[0], with_hole[1], with_hole[3]] == pytest.approx(group_normalized([1, 0, 1]))


def test_group_of_one_has_no_advantage():
    assert group_normalized([0.7]) == [0.0]
    assert group_normalized([0.7, None]) == [0.0, 0.0]


@pytest.mark.parametrize("value", [0.1, 0.35, 0.7, 1.0])
def test_equal_rewards_never_become_rounding_noise_blown_up(value):
    for size in (3, 6, 7, 16):
        assert group_normalized([value] * size) == [0.0] * size


def test_spread_below_min_std_is_no_signal():
    assert group_normalized([0.5, 0.5005, 0.5, 0.4995]) == [0.0] * 4
    assert group_normalized([0.5, 0.5005, 0.5, 0.4995], min_std=0.0)[1] == pytest.approx(1.2217522019)


def test_statistics_are_over_trajectories_not_turns():
    """Four right one-turn and four wrong three-turn rollouts: over turn rows they would get +1.68 / -0.56."""
    assert group_normalized([1, 1, 1, 1, 0, 0, 0, 0]) == pytest.approx([0.9354126] * 4 + [-0.9354126] * 4)


def test_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="finite"):
        group_normalized([1.0, float("nan")])


@given(st.lists(st.one_of(st.none(), st.floats(-10, 10)), max_size=12))
def test_advantages_of_a_group_add_up_to_zero(rewards):
    assert math.fsum(group_normalized(rewards)) == pytest.approx(0.0, abs=1e-6)
