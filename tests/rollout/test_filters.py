import json
from pathlib import Path

import pytest

from rollout.filters import ending_of, has_signal

GOLDEN = Path(__file__).parents[1] / "golden" / "values.json"


def test_golden_decisions_on_accuracy_and_on_process_rewards():
    for case in json.loads(GOLDEN.read_text())["dynamic_sampling"]:
        for mode, key in (("acc", "acc"), ("prm", "prm_return")):
            if case["mode"] == mode:
                assert has_signal(case[key], min_std=case["tol"]) == case["keep"], case["name"]


@pytest.mark.parametrize(
    ("outcomes", "ending"),
    [
        *(((None, 1, 0, None), "ready"), ((1, 0, 0, 0, *[None] * 4), "ready"), ((1, 0, None), "ready")),
        *(((None, 1, 1), "all_right"), ((None, 0, 0), "all_wrong"), ((0.1 + 0.2, 0.3, 0.3), "all_wrong")),
        *(((1, 0, *[None] * 6), "unscored"), ((1, 0, 0, *[None] * 5), "unscored")),
        *(((1, 1, 1, *[None] * 5), "unscored"), ((1, 0, None, None, None), "unscored")),
        *(((None, 1), None), ((), None)),
    ],
)
def test_ending_of_a_group_is_judged_by_those_of_it_that_could_be_scored(outcomes, ending):
    assert ending_of(outcomes, outcomes) == ending


@pytest.mark.parametrize(
    ("outcomes", "totals", "ending"),
    [
        ((1, 1, 0, 0), (1, 1, None, None), "overlong"),
        ((1, 0, 0, 0), (1, None, None, None), "overlong"),
        ((1, 0, 0, 0), (1, 0, None, None), "ready"),
        ((1, 0, 0, 0, 0), (1, 0, None, None, None), "overlong"),
        ((0, 0, 0), (None, None, None), "all_wrong"),
        ((1, 0), (0, 0), "overlong"),
        ((0, 0), (0, -1), "all_wrong"),
    ],
    ids=["cut ones were wrong", "one is left", "half is left", "less is left", "all cut", "evened out", "phantom"],
)
def test_group_has_signal_only_among_the_trajectories_that_train(outcomes, totals, ending):
    assert ending_of(outcomes, totals) == ending
