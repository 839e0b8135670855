from collections import Counter

import pytest

from configs.learner import LearnerConfig
from envs.types import Task
from reward.judging import GroupJudge, OutcomeReward, group_summary
from reward.statistics import group_facts, rollout_metrics
from rollout.types import Group, StepScores
from tests.changed import replace
from tests.reward.test_step_text import decided, make_trajectory

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


def make_judge(prm, *, transient=(BusyError,), delays_s=(0.0, 0.0)):
    outcome = OutcomeReward(LearnerConfig(), max_turn_tokens=100)
    return GroupJudge(outcome, prm and prm.score_group, transient=transient, delays_s=delays_s)


async def judged(judge, group):
    await judge.judge(group)
    return group


def raw_of(group):
    return tuple(tuple(turn.score for turn in trajectory.planner_turns) for trajectory in group.trajectories)


def digests_of(group):
    return {trajectory.prm_digest for trajectory in group.trajectories}


@pytest.mark.parametrize(
    "answers", [("42", "42"), ("1", None), ("42",), ("42", "broken"), ("broken", "broken")], ids=str
)
async def test_group_without_signal_is_not_sent_to_the_prm(answers):
    prm = ScriptedPrm()
    scored = await judged(make_judge(prm), make_group(*answers))
    assert (prm.num_calls, digests_of(scored)) == (0, {None})


async def test_group_with_a_filtered_attempt_and_without_signal_is_not_sent_to_the_prm():
    prm, group = ScriptedPrm(), make_group("42", "1")
    right, wrong = group.trajectories
    cut = replace(wrong, turns=(replace(wrong.turns[0], finish_reason="length"),))
    outcome = OutcomeReward(LearnerConfig(overlong="filter"), max_turn_tokens=100)
    await GroupJudge(outcome, prm.score_group).judge(
        replace(group, trajectories=(right, replace(right, id="g/2"), cut))
    )
    assert prm.num_calls == 0


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

    outcome = OutcomeReward(LearnerConfig(overlong="filter"), max_turn_tokens=100, process=True)
    group = make_group("not 42", None, "broken", "42", "42")
    last = group.trajectories[-1]
    cut = replace(last, turns=(replace(last.turns[0], finish_reason="length"), *last.turns[1:]))
    group = replace(group, trajectories=(*group.trajectories[:-1], cut))
    await GroupJudge(outcome, score).judge(group)
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


async def test_unscored_steps_are_counted_and_left_out_of_the_mean_score():
    unscored = await judged(make_judge(ScriptedPrm(BusyError()), delays_s=()), make_group("42", "1"))
    facts = Counter(group_facts(unscored))
    assert (facts["prm_unscored"], facts["prm_steps"]) == (4, 0)
    assert rollout_metrics(facts)["prm/unscored_share"] == 1.0
    facts.update(group_facts(await judged(make_judge(ScriptedPrm()), make_group("42", "1"))))
    assert rollout_metrics(facts)["prm/unscored_share"] == 0.5
    assert rollout_metrics(facts)["prm/score"] == pytest.approx(0.7)
