import json
from pathlib import Path

import pytest

from rollout.filters import ending_of, has_signal

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "golden.json"


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden values are not on this machine")
def test_golden_decisions_on_accuracy_and_on_process_rewards():
    for case in json.loads(GOLDEN.read_text())["dynamic_sampling"]:
        for mode, key in (("acc", "acc"), ("prm", "prm_return")):
            if case["mode"] == mode:
                assert has_signal(case[key], min_std=case["tol"]) == case["keep"], case["name"]


def test_mixed_group_is_kept_and_unanimous_ones_are_dropped():
    assert has_signal([1, 0, 0, 0])
    assert not has_signal([1, 1, 1, 1])
    assert not has_signal([0, 0, 0, 0])


def test_one_scored_trajectory_is_no_comparison():
    assert not has_signal([1, None, None])
    assert not has_signal([])


@pytest.mark.parametrize(
    ("outcomes", "ending"),
    [
        ([1, 0, None, None], "ready"),
        ([1, 1] + [None] * 6, "all_right"),
        ([0, 0, None], "all_wrong"),
        ([1, None, None], None),
    ],
)
def test_only_scored_trajectories_are_compared(outcomes, ending):
    assert ending_of(outcomes) == ending


def test_equal_rewards_with_inexact_floats_have_no_signal():
    assert not has_signal([0.1] * 3)
    assert not has_signal([0.35] * 7, min_std=1e-12)
