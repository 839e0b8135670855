import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import credit
from learner.credit import group_centered, group_normalized, outcome_gated, pooled

GOLDEN = Path(__file__).parents[1] / "golden" / "values.json"
calm = settings(max_examples=50, deadline=None)
SCORES = st.one_of(st.none(), st.floats(0, 1))
# One outcome, and the steps' scores, per trajectory.
GROUPS = st.lists(st.tuples(st.sampled_from([None, 0.0, 1.0]), st.lists(SCORES, max_size=4)), max_size=6)
SCHEMES = {
    "outcome_gated": outcome_gated,
    "pooled": lambda outcomes, scores: pooled(scores),
}
Z = math.sqrt(0.5)
"""What one right and one wrong trajectory get, plus and minus: 0.5 over the sample std of 0 and 1."""


def broadcast(outcomes, step_scores):
    return [[z] * len(steps) for z, steps in zip(group_normalized(outcomes), step_scores, strict=True)]


def in_columns(group):
    return [outcome for outcome, _ in group], [scores for _, scores in group]


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


@pytest.mark.parametrize("scheme", SCHEMES)
@calm
@given(GROUPS, st.randoms(use_true_random=False))
def test_permuting_the_trajectories_permutes_the_advantages(scheme, group, random):
    order = random.sample(range(len(group)), len(group))
    there = SCHEMES[scheme](*in_columns(group))
    back = SCHEMES[scheme](*in_columns([group[index] for index in order]))
    assert [len(advantages) for advantages in there] == [len(steps) for _, steps in group]
    assert back == [there[index] for index in order]


@calm
@given(GROUPS)
def test_gated_with_weight_zero_is_the_outcome_broadcast_exactly(group):
    outcomes, scores = in_columns(group)
    assert outcome_gated(outcomes, scores, weight=0) == broadcast(outcomes, scores)


@pytest.mark.parametrize("outcome", [0.0, 0.1, 1.0])
@calm
@given(st.lists(st.lists(SCORES, max_size=4), max_size=6))
def test_equal_outcomes_are_a_closed_gate_whatever_the_scores(outcome, scores):
    assert outcome_gated([outcome] * len(scores), scores, weight=5) == [[0.0] * len(steps) for steps in scores]


def test_gated_mixed_group_as_computed_by_hand():
    # Pool 0.2 0.8 0.5: mean 0.5, sample std sqrt((0.09 + 0.09 + 0) / 2) = 0.3.
    found = outcome_gated([1, 0], [[0.2, 0.8], [0.5]], weight=0.5)
    assert found[0] == pytest.approx([Z - 0.5, Z + 0.5], abs=1e-5)
    assert found[1] == pytest.approx([-Z], abs=1e-5)


def test_gated_step_without_a_score_keeps_its_outcome_and_moves_no_sibling():
    found = outcome_gated([1, 0], [[0.2, None, 0.8], [0.5]], weight=0.5)
    assert found[0][1] == group_normalized([1, 0])[0]
    assert [[found[0][0], found[0][2]], found[1]] == outcome_gated([1, 0], [[0.2, 0.8], [0.5]], weight=0.5)


def test_gated_scores_that_hardly_differ_add_nothing():
    """The spread of a saturated scorer is rounding noise, and never blown up."""
    assert outcome_gated([1, 0], [[0.99, 0.9901], [0.9899]], weight=0.5) == broadcast([1, 0], [[0, 0], [0]])


def test_pooled_steps_match_golden_values():
    case = json.loads(GOLDEN.read_text())["process_alternatives"]
    # The golden values are divided by the population's deviation, ours by the sample's.
    num = sum(map(len, case["step_rewards"]))
    of_sample = math.sqrt((num - 1) / num)
    for steps, expected in zip(pooled(case["step_rewards"]), case["local_step_adv_pop"], strict=True):
        assert steps == pytest.approx([of_sample * value for value in expected], abs=1e-5)


def test_pooled_unscored_step_gets_zero_and_moves_no_other():
    assert pooled([[0.2, None], [0.8]]) == [[pooled([[0.2], [0.8]])[0][0], 0.0], pooled([[0.2], [0.8]])[1]]


def test_centered_advantages_are_the_distance_from_the_mean_whatever_the_deviation():
    assert group_centered([1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]
    assert group_centered([1, None, 0.5]) == [0.25, 0.0, -0.25]
    assert group_centered([0.7, 0.7, 0.7]) == group_centered([0.5, 0.5005, 0.4995]) == [0.0] * 3
    assert group_centered([0.7]) == [0.0]
