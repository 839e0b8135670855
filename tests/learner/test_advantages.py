import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import credit
from learner.credit import group_centered, group_normalized, outcome_gated, scaled

GOLDEN = Path(__file__).parents[1] / "golden" / "values.json"
calm = settings(max_examples=50, deadline=None)
SCORES = st.one_of(st.none(), st.floats(0, 1))
# One outcome, and the steps' scores, per trajectory.
GROUPS = st.lists(st.tuples(st.sampled_from([None, 0.0, 1.0]), st.lists(SCORES, max_size=4)), max_size=6)
Z = math.sqrt(0.5)
"""What one right and one wrong trajectory get, plus and minus: 0.5 over the sample std of 0 and 1."""


def broadcast(outcomes, step_scores):
    return [[z] * len(steps) for z, steps in zip(group_normalized(outcomes), step_scores, strict=True)]


def in_columns(group):
    """Return outcomes, states and scores; siblings meet in one state at each place, and nothing else is scored."""
    scores = [scores if outcome is not None else [None] * len(scores) for outcome, scores in group]
    return [outcome for outcome, _ in group], [list(range(len(steps))) for steps in scores], scores


def gated(group, *, weight=0.5):
    return outcome_gated(*in_columns(group), weight=weight)


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


@given(st.lists(st.one_of(st.none(), st.floats(-10, 10)), max_size=12))
def test_advantages_of_a_group_add_up_to_zero(rewards):
    assert math.fsum(group_normalized(rewards)) == pytest.approx(0.0, abs=1e-6)


@calm
@given(GROUPS, st.randoms(use_true_random=False))
def test_permuting_the_trajectories_permutes_the_advantages(group, random):
    order = random.sample(range(len(group)), len(group))
    there = gated(group)
    assert [len(advantages) for advantages in there] == [len(steps) for _, steps in group]
    assert gated([group[index] for index in order]) == [there[index] for index in order]


@calm
@given(GROUPS)
def test_gated_with_weight_zero_is_the_outcome_broadcast_exactly(group):
    outcomes, _, scores = in_columns(group)
    assert gated(group, weight=0) == broadcast(outcomes, scores)


@pytest.mark.parametrize("outcome", [0.0, 0.1, 1.0])
@calm
@given(st.lists(st.lists(SCORES, max_size=4), max_size=6))
def test_equal_outcomes_are_a_closed_gate_whatever_the_scores(outcome, scores):
    assert gated([(outcome, steps) for steps in scores], weight=5) == [[0.0] * len(steps) for steps in scores]


def test_gated_scores_are_compared_within_their_state_only():
    # State 0: 0.8 and 0.2, so +0.3 and -0.3; state 1: 0.9 alone. Root mean square 0.3.
    found = gated([(1, [0.8, 0.9]), (0, [0.2])])
    assert found[0] == pytest.approx([Z + 0.5, Z], abs=1e-5)
    assert found[1] == pytest.approx([-Z - 0.5], abs=1e-5)


def test_gated_step_without_a_score_keeps_its_outcome_and_moves_no_sibling():
    pair = [(1, [0.8]), (0, [0.2])]
    found = gated([(1, [0.8, None]), (0, [0.2, None])])
    assert [steps[0] for steps in found] == [steps[0] for steps in gated(pair)]
    assert [steps[1] for steps in found] == group_normalized([1, 0])


def test_equal_scores_in_a_state_are_no_gain_whatever_their_number():
    """0.9 three times has another mean than 0.9."""
    alike = [(1, [0.9, 0.8]), (0, [0.9, 0.4]), (0, [0.9, 0.6])]
    assert gated(alike)[0][0] == group_normalized([1, 0, 0])[0]
    apart = [(outcome, [0.5, second]) for outcome, (_, second) in alike]
    assert [steps[1] for steps in gated(alike)] == [steps[1] for steps in gated(apart)]


def test_gains_are_in_units_of_their_scale_and_clipped():
    assert scaled([[0.3, 0.0], [-0.3]]) == [[1.0, 0.0], [-1.0]]
    # The scale of a scorer that hardly tells decisions apart is not blown up.
    assert scaled([[0.015], [-0.015]]) == [[pytest.approx(0.1)], [pytest.approx(-0.1)]]
    assert scaled([[0.3]] * 20 + [[9.0]])[-1] == [2.0]
    assert scaled([[], [0.0]]) == [[], [0.0]]


def test_centered_advantages_are_the_distance_from_the_mean_whatever_the_deviation():
    assert group_centered([1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]
    assert group_centered([1, None, 0.5]) == [0.25, 0.0, -0.25]
    assert group_centered([0.7, 0.7, 0.7]) == group_centered([0.5, 0.5005, 0.4995]) == [0.0] * 3
    assert group_centered([0.7]) == [0.0]
