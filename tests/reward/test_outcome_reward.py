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
from learner.packing import group_samples
from reward.judging import OutcomeReward, soft_overlong_penalty
from reward.statistics import rollout_metrics
from rollout.filters import ending_of
from rollout.types import Group, StepScores, Trajectory
from tests.reward.test_step_text import completion, sampled

GOLDEN = Path(__file__).parents[1] / "golden" / "values.json"
TASK = Task(id="t", dataset="lookup", question="6*7?", answer="42")


def make_turn(*, prompt=(1, 2), num_tokens=3, cut=False):
    return sampled(prompt, completion("x", tuple(range(10, 10 + num_tokens)), "length" if cut else "stop"))


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


def samples_of(scored, *, credit="outcome"):
    assign_credit(scored, scheme=credit, weight=0.5)
    return group_samples(scored, temperature=1.0)


def test_rewards_of_single_trajectories():
    score = make_reward().score
    assert [score(make_trajectory(answer)).total for answer in ("42", "41", None)] == [1.0, 0.0, 0.0]
    broken = score(make_trajectory(None, stop_reason="infrastructure"))
    assert (broken.outcome, broken.total) == (None, None)
    shaped = make_reward(overlong="soft", overlong_cache_tokens=20).score(make_trajectory(num_tokens=90))
    assert (shaped.outcome, shaped.total) == (1.0, pytest.approx(0.5))
    cut = make_reward(overlong="filter").score(make_trajectory("1", cut=True))
    assert (cut.outcome, cut.total) == (0.0, None)


ATTEMPTS = st.tuples(
    st.sampled_from(["42", "41", None]), st.sampled_from(["answered", "format", "infrastructure"]), st.booleans()
)


@pytest.mark.parametrize("credit", get_args(Credit))
@pytest.mark.parametrize("overlong", ["none", "soft", "filter"])
@settings(max_examples=100, deadline=None)
@given(st.lists(ATTEMPTS, max_size=8), st.integers(0, 2**32))
def test_group_is_ready_only_with_an_advantage_to_train_on(overlong, credit, attempts, seed):
    """A cut attempt has the largest length, whose penalty reduces a right answer to the reward of a wrong one."""
    rng = random.Random(seed)
    trajectories = [
        make_trajectory(answer, stop_reason=stop, index=index, cut=cut, num_tokens=100 if cut else rng.randint(1, 99))
        for index, (answer, stop, cut) in enumerate(attempts)
    ]
    scored = score_group(*trajectories, overlong=overlong, overlong_cache_tokens=50)
    raw = tuple(tuple(rng.random() for _ in trajectory.planner_turns) for trajectory in trajectories)
    StepScores(raw=raw, prm_digest="d").write_to(scored)
    samples = samples_of(scored, credit=credit)
    if ending(scored) == "ready":
        assert any(sample.advantages[sample.loss_mask].any() for sample in samples)
    elif ending(scored) == "overlong":
        assert overlong != "none"


def test_soft_overlong_matches_golden_values():
    for case in json.loads(GOLDEN.read_text())["soft_overlong"]:
        penalties = [
            soft_overlong_penalty(length, max_length=case["L_max"], cache_length=case["L_cache"])
            for length in case["lengths"]
        ]
        assert penalties == pytest.approx(case["penalty"])


def test_without_scored_trajectories_there_is_no_solve_rate():
    assert rollout_metrics({}) == {"rollout/trajectories": 0.0}
    broken = rollout_metrics({"trajectories": 2, "turns": 3, "infrastructure": 2})
    assert "rollout/solve_rate" not in broken
    assert broken["rollout/infrastructure_failures"] == 2.0
