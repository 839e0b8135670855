"""A reward of one's own for each turn: what it says stands in a PRM's place, what it may not say ends in one line."""

import asyncio
import copy
import sys

import pytest

from configs.learner import LearnerConfig
from configs.loading import load_run_config
from configs.plugins import OwnCodeError
from envs.types import Task
from learner.credit import assign_credit
from reward.judging import GroupJudge, OutcomeReward
from reward.scorers.custom import CustomTurnScorer
from rollout.types import Completion, Group, Trajectory, Turn
from tests.changed import replace

SCORERS = """
import time

def looked(task, answer, turns):
    return [1.0 if "look" in turn.completion.text else 0.0 for turn in turns]

async def later(task, answer, turns):
    return [0.5 for turn in turns]

def unsure(task, answer, turns):
    return [None, *(1 for turn in turns[1:])]

def too_few(task, answer, turns):
    return [1.0]

def two(task, answer, turns):
    return [0.0, 2.0]

def nan(task, answer, turns):
    return [0.0, float("nan")]

def nothing(task, answer, turns):
    return None

def number(task, answer, turns):
    return 1.0

def broken(task, answer, turns):
    raise KeyError("no such word")

def slow(task, answer, turns):
    time.sleep(5)

def takes_less(task, answer):
    return []
"""
TASK = Task(id="t1", dataset="mine", question="?", answer="yes", scorer="text")
CREDIT = 'reward.credit={type="outcome_gated", turn_scorer="own_turns_of_the_test:looked"}'


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_turns_of_the_test.py").write_text(SCORERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_turns_of_the_test", raising=False)


def attempt(index, answer, *said, **further):
    turns = tuple(turn(number, text) for number, text in enumerate(said))
    return Trajectory(
        id=f"g/{index}", group_id="g", task=TASK, turns=turns, answer=answer, stop_reason="answered", **further
    )


def turn(number, text):
    completion = Completion(token_ids=(7, 1), logprobs=(-0.5, -0.5), text=text, finish_reason="stop", policy_version=0)
    return Turn.of(role="planner", prompt_token_ids=tuple(range(number + 2)), completion=completion, trainable=True)


GROUP = Group(
    id="g",
    trajectories=(attempt(0, "yes", "look", "yes"), attempt(1, "no", "guess", "no")),
)


def judged(name, group=GROUP, limit_s=5.0):
    scorer = CustomTurnScorer(f"own_turns_of_the_test:{name}", limit_s=limit_s)
    judge = GroupJudge(OutcomeReward(LearnerConfig(), max_turn_tokens=100), scorer.score_group)
    group = copy.deepcopy(group)
    asyncio.run(judge.judge(group))
    return group


def raw_of(group):
    return tuple(tuple(turn.score for turn in one.planner_turns) for one in group.trajectories)


def test_the_scores_of_turns_are_credited_on_top_of_the_outcome():
    scored = judged("looked")
    assert raw_of(scored) == ((1.0, 0.0), (0.0, 0.0))
    assign_credit(scored, scheme="outcome_gated", prm_weight=0.5)
    first, second = ([turn.advantage for turn in one.planner_turns] for one in scored.trajectories)
    # Outcomes 1 and 0: +-0.7071. Pool 1, 0, 0, 0: mean 0.25, sample deviation 0.5, so +1.5 and -0.5, half of each.
    assert first == pytest.approx([0.7071 + 0.75, 0.7071 - 0.25], abs=1e-3)
    assert second == pytest.approx([-0.7071 - 0.25, -0.7071 - 0.25], abs=1e-3)


def test_it_may_be_asynchronous_and_leave_turns_unscored():
    assert raw_of(judged("later")) == ((0.5, 0.5), (0.5, 0.5))
    assert raw_of(judged("unsure")) == ((None, 1.0), (None, 1.0))


def test_it_is_not_asked_about_groups_without_signal_nor_about_attempts_that_broke():
    alike = replace(GROUP, trajectories=(GROUP.trajectories[0], replace(GROUP.trajectories[0], id="g/1")))
    assert raw_of(judged("broken", alike)) == ((None, None),) * 2
    broken = replace(attempt(2, None, "look"), stop_reason="infrastructure")
    scored = judged("looked", replace(GROUP, trajectories=(*GROUP.trajectories, broken)))
    assert raw_of(scored) == ((1.0, 0.0), (0.0, 0.0), (None,))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("too_few", r"returned 1 scores for the 2 turns of an attempt at task 't1'"),
        ("two", r"returned 2\.0 for turn 2 of an attempt at task 't1'; a score is a number from 0 to 1"),
        ("nan", r"returned nan for turn 2 of an attempt at task 't1'"),
        ("nothing", r"returned None for the 2 turns of an attempt at task 't1'; return a list with a number for each"),
        ("number", r"returned 1\.0 for the 2 turns"),
        ("broken", r"failed on task 't1' with KeyError: 'no such word' \(own_turns_of_the_test\.py, line 29\)"),
        ("slow", r"gave no score for task 't1' within 0\.05 s"),
        ("takes_less", r"is called as takes_less\(task, answer, turns\) and does not take that"),
        ("missing", r"cannot be imported: AttributeError"),
    ],
)
def test_what_is_no_score_is_one_line_that_names_the_function(name, says):
    with pytest.raises(OwnCodeError, match=says) as caught:
        judged(name, limit_s=0.05 if name == "slow" else 5.0)
    assert f"own_turns_of_the_test:{name}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_with_one_trains_and_asks_no_prm():
    config = load_run_config(None, [CREDIT])
    assert (config.trains_prm, config.reward.prm, config.names_code) == (False, None, True)
    assert config.reward.turn_scorer == "own_turns_of_the_test:looked"
    own_agent = load_run_config(None, [CREDIT, "agent.function=mine:solve", "cold_start.num_demonstrations=0"])
    assert own_agent.reward.turn_scorer == config.reward.turn_scorer


def test_a_prm_besides_is_refused():
    both = CREDIT.replace("}", ', prm_path="runs/r/prm"}')
    with pytest.raises(Exception, match=r"turn_scorer scores turns in a PRM's place: leave prm_path out"):
        load_run_config(None, [both])
