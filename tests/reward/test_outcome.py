import json
import random
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.learner import LearnerConfig
from configs.reward import Credit
from envs.types import Task
from learner.credit import assign_credit
from learner.samples import group_samples
from reward.judging import OutcomeReward, soft_overlong_penalty
from reward.statistics import RolloutStatistics, group_statistics
from rollout.filters import ending_of
from rollout.types import Completion, Group, StepScores, Trajectory, Turn
from tests.changed import replace

GOLDEN = Path(__file__).parents[1] / "golden" / "values.json"
TASK = Task(id="t", dataset="arith", question="6*7?", answer="42")


def make_turn(*, prompt=(1, 2), num_tokens=3, cut=False):
    completion = Completion(
        token_ids=tuple(range(10, 10 + num_tokens)),
        logprobs=(-1.0,) * num_tokens,
        text="x",
        finish_reason="length" if cut else "stop",
        policy_version=1,
    )
    return Turn.of(role="planner", prompt_token_ids=prompt, completion=completion, trainable=True)


def make_trajectory(answer="42", *, stop_reason="answered", index=0, **turn):
    turns = () if stop_reason == "infrastructure" else (make_turn(**turn),)
    return Trajectory(id=f"g/{index}", group_id="g", task=TASK, turns=turns, answer=answer, stop_reason=stop_reason)


def make_reward(**learner):
    return OutcomeReward(LearnerConfig(**learner), max_turn_tokens=100)


def score_group(*trajectories, **learner):
    judge, group = make_reward(**learner), Group(id="g", trajectories=trajectories)
    for trajectory in trajectories:
        trajectory.reward = judge.score(trajectory)
    return group


def ending(group):
    return ending_of(group.outcomes, group.totals)


def test_right_wrong_and_missing_answers():
    assert [make_reward().score(make_trajectory(answer)).total for answer in ("42", "41", None)] == [1.0, 0.0, 0.0]


def test_infrastructure_failure_is_unscorable_and_never_zero():
    reward = make_reward().score(make_trajectory(None, stop_reason="infrastructure"))
    assert reward.outcome is None
    assert reward.total is None


def samples_of(scored, *, credit="outcome"):
    assign_credit(scored, scheme=credit, prm_weight=0.5)
    return group_samples(scored, temperature=1.0)


def test_unscorable_trajectory_trains_nothing_and_moves_no_sibling():
    broken = make_trajectory(None, stop_reason="infrastructure", index=9)
    with_it = samples_of(score_group(make_trajectory(index=0), make_trajectory("1", index=1), broken))
    without = samples_of(score_group(make_trajectory(index=0), make_trajectory("1", index=1)))
    assert [one.advantages.tolist() for one in with_it] == [one.advantages.tolist() for one in without]


def test_soft_overlong_shapes_the_total_but_never_the_outcome():
    reward = make_reward(overlong="soft", overlong_cache_tokens=20).score(make_trajectory(num_tokens=90))
    assert reward.outcome == 1.0
    assert reward.total == pytest.approx(0.5)


def test_all_wrong_group_with_different_length_penalties_has_no_signal():
    """The phantom gradient: shaped rewards differ, the task decides nothing."""
    scored = score_group(
        make_trajectory("1", num_tokens=3),
        make_trajectory("2", num_tokens=99, index=1),
        overlong="soft",
        overlong_cache_tokens=20,
    )
    assert len(set(scored.totals)) == 2
    assert ending(scored) == "all_wrong"


@pytest.mark.parametrize(("overlong", "total"), [("filter", 1.0), ("soft", 0.5)])
def test_overlong_rule_ignores_turns_that_are_not_trained(overlong, total):
    """A replayed turn of 100 tokens that was cut, then 90 of its own."""
    repeated = replace(make_turn(num_tokens=100, cut=True), trainable=False)
    own = make_trajectory(num_tokens=90)
    fork = replace(own, turns=(repeated, *own.turns))
    assert make_reward(overlong=overlong, overlong_cache_tokens=20).score(fork).total == pytest.approx(total)


def test_overlong_filter_takes_a_cut_trajectory_out_of_loss_and_statistics():
    reward = make_reward(overlong="filter").score(make_trajectory("1", cut=True))
    assert (reward.outcome, reward.total) == (0.0, None)


ATTEMPTS = st.tuples(
    st.sampled_from(["42", "41", None]), st.sampled_from(["answered", "format", "infrastructure"]), st.booleans()
)


@pytest.mark.parametrize("credit", get_args(Credit))
@pytest.mark.parametrize("overlong", ["none", "soft", "filter"])
@settings(max_examples=100, deadline=None)
@given(st.lists(ATTEMPTS, max_size=8), st.integers(0, 2**32))
def test_group_is_ready_only_with_an_advantage_to_train_on(overlong, credit, attempts, seed):
    """A cut attempt is as long as a turn may be: its penalty takes a right answer down to a wrong one's reward."""
    rng = random.Random(seed)
    trajectories = [
        make_trajectory(answer, stop_reason=stop, index=index, cut=cut, num_tokens=100 if cut else rng.randint(1, 99))
        for index, (answer, stop, cut) in enumerate(attempts)
    ]
    scored = score_group(*trajectories, overlong=overlong, overlong_cache_tokens=50)
    raw = tuple(tuple(rng.random() for _ in one.planner_turns) for one in trajectories)
    StepScores(raw=raw, prm_digest="d").write_to(scored)
    samples = samples_of(scored, credit=credit)
    if ending(scored) == "ready":
        assert any(sample.advantages[sample.loss_mask].any() for sample in samples)
    elif ending(scored) == "overlong":
        assert overlong != "none"


def test_group_whose_cut_attempts_are_filtered_is_not_ready():
    right = [make_trajectory(index=index) for index in range(6)]
    cut = [make_trajectory("1", cut=True, index=index) for index in (6, 7)]
    assert ending(score_group(*right, *cut)) == "ready"
    assert ending(score_group(*right, *cut, overlong="filter")) == "overlong"
    assert ending(score_group(right[0], *cut, overlong="filter")) == "overlong"


def test_right_attempt_whose_penalty_evens_it_out_with_a_wrong_one_is_no_signal():
    group = make_trajectory(num_tokens=100), make_trajectory("1", index=1)
    assert ending(score_group(*group)) == "ready"
    assert ending(score_group(*group, overlong="soft", overlong_cache_tokens=20)) == "overlong"


def test_soft_overlong_matches_golden_values():
    for case in json.loads(GOLDEN.read_text())["soft_overlong"]:
        found = [
            soft_overlong_penalty(length, max_length=case["L_max"], cache_length=case["L_cache"])
            for length in case["lengths"]
        ]
        assert found == pytest.approx(case["penalty"])


def test_one_advantage_for_a_trajectory_however_many_turns_it_has():
    first = make_turn()
    longer = make_turn(prompt=(*first.prompt_token_ids, *first.completion.token_ids, 99))
    long = Trajectory(id="g/0", group_id="g", task=TASK, turns=(first, longer), answer="42", stop_reason="answered")
    samples = samples_of(score_group(long, make_trajectory("1", index=1)))
    assert set(samples[0].advantages[samples[0].loss_mask]) == {-samples[1].advantages[samples[1].loss_mask][0]}
    assert samples[0].loss_mask.tolist() == [False, False, True, True, True, False, True, True, True]
    assert samples[0].turn_ids.tolist() == [-1, -1, 0, 0, 0, -1, 1, 1, 1]


def test_turn_whose_prompt_does_not_continue_the_one_before_is_a_sample_of_its_own_with_the_same_advantage():
    edited = Trajectory(
        id="g/0",
        group_id="g",
        task=TASK,
        turns=(make_turn(), make_turn(prompt=(7, 7, 7, 7, 7, 7))),
        answer="42",
        stop_reason="answered",
    )
    first, second, other = samples_of(score_group(edited, make_trajectory("1", index=1)))
    assert (first.trajectory_id, second.trajectory_id, other.trajectory_id) == ("g/0", "g/0", "g/1")
    assert set(second.advantages[second.loss_mask]) == set(first.advantages[first.loss_mask])
    assert second.token_ids[:6].tolist() == [7] * 6


def test_failed_trajectories_stay_in_the_denominator_of_the_solve_rate():
    statistics = group_statistics(score_group(make_trajectory(), make_trajectory(None, stop_reason="format", index=1)))
    both = statistics + RolloutStatistics()
    assert both.metrics()["rollout/solve_rate"] == 0.5


def test_no_solve_rate_is_made_up_where_nothing_was_rolled_out_or_scored():
    assert RolloutStatistics().metrics() == {"rollout/trajectories": 0.0}
    broken = RolloutStatistics(trajectories=2, turns=3, infrastructure=2).metrics()
    assert "rollout/solve_rate" not in broken
    assert broken["rollout/infrastructure_failures"] == 2.0
