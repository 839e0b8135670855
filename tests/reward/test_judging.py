import json
import random
from collections import Counter
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
from reward.judging import GroupJudge, OutcomeReward, group_summary, rescued, retried, soft_overlong_penalty
from reward.statistics import group_facts, rollout_metrics
from rollout.filters import ending_of
from rollout.guide import Guide
from rollout.types import Group, StepScores
from tests.changed import replace
from tests.reward.test_step_text import completion, decided, make_trajectory, sampled

GOLDEN = Path(__file__).parents[1] / "golden" / "values.json"
TASK = Task(id="t", dataset="lookup", question="6*7?", answer="42")


class BusyError(Exception):
    pass


class ScriptedPrm:
    """A PRM that raises the given errors in turn, then scores every step 0.7."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.num_calls = 0

    async def score_group(self, group):
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return StepScores(
            raw=tuple((0.7,) * len(trajectory.planner_turns) for trajectory in group.trajectories), prm_digest="d"
        )


def make_group(*answers):
    """Return a group; the answer `broken` is of a trajectory that the infrastructure ended after its turns."""
    trajectories = [
        make_trajectory(
            *(decided("think", "x", "ok") for _ in range(2)),
            task=TASK,
            id=f"g/{index}",
            answer=None if answer == "broken" else answer,
            stop_reason="infrastructure" if answer == "broken" else "answered",
        )
        for index, answer in enumerate(answers)
    ]
    return Group(id="g", trajectories=tuple(trajectories))


def outcome_reward(*, process=False, **learner):
    return OutcomeReward(LearnerConfig(**learner), max_turn_tokens=100, process=process)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr("reward.judging.RETRY_DELAYS_S", (0.0, 0.0))


def make_judge(prm, *, transient=(BusyError,)):
    return GroupJudge(outcome_reward(), prm and retried(prm.score_group, transient), transient=transient)


async def judged(judge, group):
    await judge.judge(group)
    return group


def raw_of(group):
    return tuple(tuple(turn.score for turn in trajectory.planner_turns) for trajectory in group.trajectories)


def digests_of(group):
    return {trajectory.prm_digest for trajectory in group.trajectories}


@pytest.mark.parametrize(("num_errors", "digest", "score"), [(0, "d", 0.7), (2, "d", 0.7), (3, "", None)])
async def test_transient_errors_are_retried_and_then_the_group_stays_unscored(num_errors, digest, score):
    prm = ScriptedPrm(*[BusyError()] * num_errors)
    scored = await judged(make_judge(prm), make_group("42", "1", "broken"))
    assert prm.num_calls == min(num_errors + 1, 3)
    assert (raw_of(scored), digests_of(scored)) == (((score, score),) * 3, {digest})
    assert scored.outcomes == [1.0, 0.0, None]
    with pytest.raises(BusyError):
        await judged(make_judge(ScriptedPrm(BusyError()), transient=()), make_group("42", "1"))


async def test_process_reward_is_the_lowest_step_score_whatever_the_answer_is():
    async def score(group):
        return StepScores(raw=((0.9, 0.2), (0.9, 0.9), (0.9, 0.9), (0.9, None), (0.9, 0.9)), prm_digest="d")

    group = make_group("not 42", None, "broken", "42", "42")
    last = group.trajectories[-1]
    cut = replace(last, turns=(replace(last.turns[0], finish_reason="length"), *last.turns[1:]))
    group = replace(group, trajectories=(*group.trajectories[:-1], cut))
    await GroupJudge(outcome_reward(overlong="filter", process=True), score).judge(group)
    # 0.05 + 0.95 * 0.2; no answer; ended by the infrastructure; a step without a score; cut off by the token limit.
    assert group.outcomes == [pytest.approx(0.24), 0.0, None, None, pytest.approx(0.905)]
    assert group.totals == [pytest.approx(0.24), 0.0, None, None, None]


async def test_summary_holds_the_facts_of_a_group():
    group = make_group("42", "1", "broken")
    prm_s = await make_judge(None).judge(group)
    summary = group_summary(group, duration_s=1.0, prm_s=prm_s)
    assert (summary.ending, summary.right, summary.scored, summary.versions) == ("ready", 1.0, 2, {1: 6})
    assert (summary.facts["prm_s"], summary.facts["groups"], summary.facts["kept"]) == (0.0, 1.0, 1.0)
    assert (summary.facts["scored"], summary.facts["unscored"]) == (2, 1)
    assert summary.reason


@pytest.mark.parametrize(
    ("plain", "guided", "kept"),
    [
        (("1", "broken", "2", "3"), ("1", "42"), ["1", "2", "3", "42"]),
        (("1", "2"), ("42", "42", "42"), ["1", "42"]),
    ],
)
async def test_right_guided_attempts_take_the_places_of_wrong_ones_and_do_not_count_as_the_policy_s(
    plain, guided, kept
):
    judge, group, others = make_judge(None), make_group(*plain), make_group(*guided)
    await judge.judge(group)
    await judge.judge(others)
    before = group_summary(group, duration_s=1.0, prm_s=0.0)
    guides = [Guide(task=TASK, score_steps=None, candidates=2, num_tokens=7, waited_s=n) for n in (0.5, 0.25)]
    found, after = rescued(group, before, others, guides, duration_s=2.0)
    assert [one.answer for one in found.trajectories] == kept
    assert (before.ending, after.ending, after.right, after.scored) == ("all_wrong", "ready", 0.0, before.scored)
    changed = {
        "kept": 1.0,
        "duration_s": 3.0,
        "prm_s": 0.5,
        "guided_groups": 1.0,
        "rescued": 1.0,
        "guided_tokens": 14.0,
    }
    assert after.facts == before.facts | changed
    assert after.versions == found.token_versions
    metrics = rollout_metrics(after.facts)
    assert (metrics["rollout/solve_rate"], metrics["guided/rescued_share"]) == (0.0, 1.0)


async def test_group_that_no_guided_attempt_rescues_ends_all_wrong():
    judge, group, others = make_judge(None), make_group("1", "2"), make_group("3", "broken")
    await judge.judge(group)
    await judge.judge(others)
    before = group_summary(group, duration_s=1.0, prm_s=0.0)
    found, after = rescued(group, before, others, [Guide(task=TASK, score_steps=None, candidates=2)], duration_s=2.0)
    assert (found, after.ending, after.facts["rescued"]) == (group, "all_wrong", 0.0)


async def test_unscored_steps_are_counted_and_left_out_of_the_mean_score():
    unscored = await judged(make_judge(ScriptedPrm(*[BusyError()] * 3)), make_group("42", "1"))
    facts = Counter(group_facts(unscored))
    assert (facts["prm_unscored"], facts["prm_steps"]) == (4, 0)
    assert rollout_metrics(facts)["prm/unscored_share"] == 1.0
    facts.update(group_facts(await judged(make_judge(ScriptedPrm()), make_group("42", "1"))))
    assert rollout_metrics(facts)["prm/unscored_share"] == 0.5
    assert rollout_metrics(facts)["prm/score"] == pytest.approx(0.7)


# Outcome rewards.


def attempt(answer="42", *, stop_reason="answered", index=0, num_tokens=3, cut=False):
    turn = sampled((1, 2), completion("x", tuple(range(num_tokens)), "length" if cut else "stop"))
    turns = () if stop_reason == "infrastructure" else (turn,)
    return make_trajectory(*turns, task=TASK, id=f"g/{index}", answer=answer, stop_reason=stop_reason)


@pytest.mark.parametrize(
    ("trajectory", "learner", "outcome", "total"),
    [
        *((attempt(answer), {}, score, score) for answer, score in (("42", 1.0), ("41", 0.0), (None, 0.0))),
        (attempt(None, stop_reason="infrastructure"), {}, None, None),
        (attempt(num_tokens=90), {"overlong": "soft", "overlong_cache_tokens": 20}, 1.0, pytest.approx(0.5)),
        (attempt("1", cut=True), {"overlong": "filter"}, 0.0, None),
    ],
)
def test_rewards_of_single_trajectories(trajectory, learner, outcome, total):
    reward = outcome_reward(**learner).score(trajectory)
    assert (reward.outcome, reward.total) == (outcome, total)


ATTEMPTS = st.tuples(
    st.sampled_from(["42", "41", None]), st.sampled_from(["answered", "format", "infrastructure"]), st.booleans()
)


@pytest.mark.parametrize("credit", get_args(Credit))
@pytest.mark.parametrize("overlong", ["none", "soft", "filter"])
@settings(max_examples=100, deadline=None)
@given(st.lists(ATTEMPTS, max_size=8), st.integers(0, 2**32))
def test_group_is_ready_only_with_an_advantage_to_train_on(overlong, credit, attempts, seed):
    """A cut attempt has the largest length, whose penalty reduces a right answer to the reward of a wrong one."""
    rng, reward = random.Random(seed), outcome_reward(overlong=overlong, overlong_cache_tokens=50)
    trajectories = [
        attempt(answer, stop_reason=stop, index=index, cut=cut, num_tokens=100 if cut else rng.randint(1, 99))
        for index, (answer, stop, cut) in enumerate(attempts)
    ]
    for trajectory in trajectories:
        trajectory.reward = reward.score(trajectory)
    group = Group(id="g", trajectories=tuple(trajectories))
    raw = tuple(tuple(rng.random() for _ in trajectory.planner_turns) for trajectory in trajectories)
    StepScores(raw=raw, prm_digest="d").write_to(group)
    assign_credit(group, scheme=credit)
    samples = group_samples(group, temperature=1.0)
    ending = ending_of(group.outcomes, group.totals)
    assert ending != "ready" or any(sample.advantages[sample.loss_mask].any() for sample in samples)
    assert ending != "overlong" or overlong != "none"


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
