import asyncio
import threading
import time

import pytest

from configs.learner import LearnerConfig
from envs.types import Task, ToolCall, ToolResult
from reward.judging import GroupJudge, OutcomeReward, group_summary
from reward.statistics import group_statistics
from rollout.filters import ending_of
from rollout.types import Completion, Group, StepScores, Trajectory, Turn
from tests.changed import replace

TASK = Task(id="t", dataset="arith", question="6*7?", answer="42")


class BusyError(Exception):
    pass


class ScriptedPrm:
    """Raises the given errors in turn, then scores every step 0.7."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.num_calls = 0

    async def score_group(self, group):
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return StepScores(raw=tuple((0.7,) * len(one.planner_turns) for one in group.trajectories), prm_digest="d")


def make_turn():
    completion = Completion(token_ids=(5,), logprobs=(-1.0,), text="x", finish_reason="stop", policy_version=1)
    return Turn.of(
        role="planner",
        prompt_token_ids=(1,),
        completion=completion,
        trainable=True,
        tool_call=ToolCall(name="think", arguments="x"),
        tool_result=ToolResult(text="ok"),
    )


def make_group(*answers, num_turns=2):
    """`broken` stands for a trajectory that the infrastructure ended after its turns."""
    trajectories = [
        Trajectory(
            id=f"g/{index}",
            group_id="g",
            task=TASK,
            turns=tuple(make_turn() for _ in range(num_turns)),
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
    return tuple(tuple(turn.score for turn in one.planner_turns) for one in group.trajectories)


def digests_of(group):
    return {one.prm_digest for one in group.trajectories}


async def test_scoring_does_not_hold_up_the_event_loop():
    """The scorer waits for another task of the same loop, as long as it must."""
    ticked = threading.Event()

    class Slow:
        def score(self, trajectory):
            assert ticked.wait(timeout=60)
            return OutcomeReward(LearnerConfig(), max_turn_tokens=100).score(trajectory)

    async def tick():
        ticked.set()

    scored, _ = await asyncio.gather(judged(GroupJudge(Slow()), make_group("42", "1")), tick())
    assert scored.outcomes == [1.0, 0.0]


@pytest.mark.parametrize(
    "answers", [("42", "42"), ("1", None), ("42",), ("42", "broken"), ("broken", "broken")], ids=str
)
async def test_group_without_signal_is_never_sent_to_the_prm(answers):
    prm = ScriptedPrm()
    scored = await judged(make_judge(prm), make_group(*answers))
    assert (prm.num_calls, digests_of(scored)) == (0, {None})


async def test_group_whose_cut_attempts_are_filtered_is_never_sent_to_the_prm():
    prm = ScriptedPrm()
    outcome = OutcomeReward(LearnerConfig(overlong="filter"), max_turn_tokens=100)
    group = make_group("42", "1")
    right, wrong = group.trajectories
    cut = replace(wrong, turns=(replace(make_turn(), finish_reason="length"),))
    scored = await judged(
        GroupJudge(outcome, prm.score_group), replace(group, trajectories=(right, replace(right, id="g/2"), cut))
    )
    assert (prm.num_calls, ending_of(scored.outcomes, scored.totals)) == (0, "overlong")


async def test_transient_error_is_tried_again():
    prm = ScriptedPrm(BusyError(), BusyError())
    scored = await judged(make_judge(prm), make_group("42", "1"))
    assert (prm.num_calls, digests_of(scored)) == (3, {"d"})


async def test_group_goes_on_unscored_after_the_last_try():
    prm = ScriptedPrm(*[BusyError()] * 3)
    scored = await judged(make_judge(prm), make_group("42", "1", "broken"))
    assert prm.num_calls == 3
    assert (raw_of(scored), digests_of(scored)) == (((None, None),) * 3, {""})
    assert scored.outcomes == [1.0, 0.0, None]


class SlowOutcome(OutcomeReward):
    SECONDS = 0.2

    def score(self, trajectory):
        time.sleep(self.SECONDS)
        return super().score(trajectory)


class SlowPrm(ScriptedPrm):
    SECONDS = 0.1

    async def score_group(self, group):
        await asyncio.sleep(self.SECONDS)
        return await super().score_group(group)


async def test_only_what_step_scores_took_counts_as_waiting_for_them():
    outcome, prm = SlowOutcome(LearnerConfig(), max_turn_tokens=100), SlowPrm(BusyError())
    started = time.monotonic()
    judge = GroupJudge(outcome, prm.score_group, transient=(BusyError,), delays_s=(0.1,))
    waited_s = await judge.judge(make_group("42", "1"))
    took_s = time.monotonic() - started
    assert 2 * SlowPrm.SECONDS + 0.1 <= waited_s <= took_s - SlowOutcome.SECONDS


async def test_summary_holds_the_facts_of_a_group():
    group = make_group("42", "1", "broken")
    prm_s = await make_judge(None).judge(group)
    summary = group_summary(group, duration_s=1.0, prm_s=prm_s)
    assert (summary.ending, summary.right, summary.scored, summary.versions) == ("ready", 1.0, 2, {1: 6})
    assert (summary.facts["prm_s"], summary.facts["groups"], summary.facts["kept"]) == (0.0, 1.0, 1.0)
    assert summary.reason


async def test_unscored_steps_are_counted_and_are_no_zeros_in_the_mean_score():
    unscored = await judged(make_judge(ScriptedPrm(BusyError()), delays_s=()), make_group("42", "1"))
    statistics = group_statistics(unscored)
    assert (statistics.prm_unscored, statistics.prm_steps) == (4, 0)
    assert statistics.metrics()["prm/unscored_share"] == 1.0
    both = statistics + group_statistics(await judged(make_judge(ScriptedPrm()), make_group("42", "1")))
    assert both.metrics()["prm/unscored_share"] == 0.5
    assert both.metrics()["prm/score"] == pytest.approx(0.7)


async def test_without_transient_errors_named_every_error_propagates():
    with pytest.raises(BusyError):
        await judged(make_judge(ScriptedPrm(BusyError()), transient=()), make_group("42", "1"))
