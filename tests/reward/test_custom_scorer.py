"""Custom scorers of answers and of turns: their scores count, and their faults end with one clear error."""

import asyncio
import copy
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs.learner import LearnerConfig
from configs.loading import load_run_config
from configs.plugins import OwnCodeError
from envs.types import Task
from reward.judging import GroupJudge, OutcomeReward, failed_summary, group_summary
from reward.scorers import score_answer
from reward.scorers.custom import CustomTurnScorer, scorer_of
from reward.scorers.process import _CHILDREN, ScoringError
from rollout.filters import ending_of
from rollout.types import Group, Trajectory
from tests.changed import replace
from tests.reward.test_step_text import completion, sampled

MODULE = "custom_scorers_of_the_test"
SCORERS = """
import asyncio
import os
import re
import sys
import time
import numpy as np

def half(task, answer):
    return 0.5 if task.metadata["wants"] in answer else False

def by_length(task, answer):
    return len(answer) / 10

def num_turns(task, answer, turns):
    return len(turns) == 0

def unsure(task, answer):
    return None if answer == "?" else 1

def returns(task, answer):
    values = {"nan": float("nan"), "two": 2.0, "list": [1], "32": np.float32(0.5), "true": np.bool_(1), "8": np.int8(1)}
    return values.get(answer, answer)

def broken(task, answer):
    raise KeyError("no such word")

def slow(task, answer):
    time.sleep(600)

async def later(task, answer):
    await asyncio.sleep(0)
    return 0.25

async def exits(task, answer):
    sys.exit(1)

async def never(task, answer):
    await asyncio.Event().wait()

def backtracks(task, answer):
    return 0.5 if answer != "runaway" else re.fullmatch("(a|a)*b", "a" * 40)

def dies(task, answer):
    return 0.5 if answer != "dies" else os._exit(3)

def process(task, answer):
    return 1 / os.getpid()

second_started = asyncio.Event()

async def together(task, answer):
    if answer == "b":
        second_started.set()
    await second_started.wait()
    return 1.0

def alone(task):
    return 1.0

number = 3

def looked(task, answer, turns):
    return [1.0 if "look" in turn.completion.text else 0.0 for turn in turns]

async def turns_later(task, answer, turns):
    return [None, *(0.5 for turn in turns[1:])]

def too_few(task, answer, turns):
    return [1.0]

def turns_invalid(task, answer, turns):
    return {"yes": [0.0, 2.0], "0": [0.0, 0.0]}.get(answer)

def turns_broken(task, answer, turns):
    raise KeyError("no such word")

def turns_slow(task, answer, turns):
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def custom_module(tmp_path, monkeypatch):
    (tmp_path / f"{MODULE}.py").write_text(SCORERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    scorer_of.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def end_of_processes():
    # The processes keep the module, which is the same in every test.
    yield
    for child in _CHILDREN.values():
        child.kill()


def task(name, **further):
    scorer = f"{MODULE}:{name}"
    return Task(id="t1", dataset="mine", question="?", answer="x", scorer=scorer, metadata={"wants": "o"}, **further)


def attempt(task, answer, *texts, index=0):
    turns = tuple(sampled(tuple(range(number + 2)), completion(text)) for number, text in enumerate(texts))
    return Trajectory(id=f"g/{index}", group_id="g", task=task, turns=turns, answer=answer, stop_reason="answered")


def judged(name, *answers, limit_s=60.0):
    one = task(name, scoring_limit_s=limit_s)
    attempts = (attempt(one, answer, index=index) for index, answer in enumerate(answers))
    group = Group(id="g", trajectories=tuple(attempts))
    asyncio.run(GroupJudge(OutcomeReward(LearnerConfig(), max_turn_tokens=100)).judge(group))
    return group


def ending(group):
    return ending_of(group.outcomes, group.totals)


# Scorers of answers.


@pytest.mark.parametrize(
    ("name", "answer", "score"),
    [
        ("half", "foo", 0.5),
        ("half", "bar", 0.0),
        ("num_turns", "bar", 1.0),
        ("later", "a", 0.25),
        ("returns", "32", 0.5),
        ("returns", "true", 1.0),
        ("returns", "8", 1.0),
        ("broken", None, 0.0),
        ("broken", " \n", 0.0),
    ],
)
def test_score_of_an_answer(name, answer, score):
    assert score_answer(task(name), answer) == score


def test_a_task_may_name_a_built_in_comparison():
    whole = Task(id="t", dataset="mine", question="?", answer="1,000", scorer="integer")
    assert (score_answer(whole, "1000.0"), score_answer(whole, "1000.5")) == (1.0, 0.0)
    with pytest.raises(OwnCodeError, match="integer"):
        score_answer(replace(whole, scorer="intger"), "1")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        *(("returns", answer) for answer in ("nan", "two", "1", "list")),
        *(("broken", "a"), ("dies", "dies"), ("exits", "a")),
    ],
)
def test_a_failed_score_is_one_line_that_names_the_function_and_leaves_the_attempt_unscored(name, answer):
    with pytest.raises(ScoringError, match=f"{MODULE}:{name}") as caught:
        score_answer(task(name), answer)
    group = judged(name, answer)
    assert (group.outcomes, ending(group)) == ([None], None)
    assert group_summary(group, duration_s=0.0, prm_s=0.0).reason == f"1 of 1 {caught.value}"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["slow", "backtracks", "never"])
def test_what_runs_away_is_ended_at_its_limit(name):
    """A coroutine is cancelled; for anything else the process ends, also if a regular expression holds its lock."""
    before = score_answer(task("process"), "a")
    with pytest.raises(ScoringError, match=r"reward\.timeout_s"):
        score_answer(task(name, scoring_limit_s=0.05), "runaway")
    assert (score_answer(task("process"), "a") == before) == (name == "never")


@pytest.mark.parametrize(("name", "fatal"), [("backtracks", "runaway"), ("dies", "dies")])
def test_what_ends_the_process_costs_no_other_answer_its_score(name, fatal):
    assert judged(name, "a", fatal, "b", limit_s=2.0).outcomes == [0.5, None, 0.5]


def test_keys_are_in_no_reason(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "a-key-of-the-test")
    told = replace(attempt(TASK, None), stop_reason="infrastructure", failure="x" * 280 + " a-key-of-the-test")
    reasons = [group_summary(Group(id="g", trajectories=(told,)), duration_s=0.0, prm_s=0.0).reason]
    reasons += [failed_summary(RuntimeError("a-key-of-the-test")).reason, judged("returns", "a-key-of-the-test")]
    assert "a-key" not in str(reasons).replace("answer='a-key-of-the-test'", "")


def test_the_process_ends_with_its_worker(tmp_path):
    """Also while a scorer runs."""
    code = (
        "from reward.scorers import score_answer; from tests.reward import test_custom_scorer as t;"
        "print(1 / score_answer(t.task('process'), 'a'), flush=True);"
        "score_answer(t.task('slow', scoring_limit_s=600), 'a')"
    )
    command, path = [sys.executable, "-c", code], os.pathsep.join((str(tmp_path), os.getcwd()))
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}) as worker:
        process = Path(f"/proc/{round(float(worker.stdout.readline()))}")
        assert process.exists()
        worker.kill()
    while process.exists():
        time.sleep(0.01)


def test_attempts_of_a_group_are_scored_concurrently():
    assert judged("together", "a", "b").outcomes == [1.0, 1.0]


def test_scores_between_zero_and_one_give_signal():
    scored = judged("by_length", "aa", "aaaa", "aaaaaa", "aaaaaaaa")
    assert scored.outcomes == [0.2, 0.4, 0.6, 0.8]
    assert ending(scored) == "ready"
    assert ending(judged("by_length", "aa", "bb")) != "ready"


def test_an_undecided_answer_is_unscored_and_not_wrong():
    scored = judged("unsure", "?", "?")
    assert (scored.outcomes, ending(scored)) == ([None, None], None)
    assert group_summary(scored, duration_s=0.0, prm_s=0.0).reason


# Scorers of turns.

TASK = Task(id="t1", dataset="mine", question="?", answer="yes", scorer="text")
PAIR = (attempt(TASK, "yes", "look", "yes"), attempt(TASK, "no", "guess", "no", index=1))
CREDIT = f'reward.credit={{type="outcome_guided", turn_scorer="{MODULE}:looked"}}'


def turns_judged(name, trajectories=PAIR, limit_s=60.0):
    scorer = CustomTurnScorer(f"{MODULE}:{name}", limit_s=limit_s)
    judge = GroupJudge(OutcomeReward(LearnerConfig(), max_turn_tokens=100), scorer.score_group)
    group = Group(id="g", trajectories=copy.deepcopy(trajectories))
    asyncio.run(judge.judge(group))
    return group


def raw_of(group):
    return tuple(tuple(turn.score for turn in trajectory.planner_turns) for trajectory in group.trajectories)


def test_scores_of_turns_are_kept_with_their_turns():
    assert raw_of(turns_judged("looked")) == ((1.0, 0.0), (0.0, 0.0))
    assert raw_of(turns_judged("turns_later")) == ((None, 0.5), (None, 0.5))


def test_attempts_that_the_infrastructure_ended_are_not_scored():
    broken = replace(attempt(TASK, None, "look", index=2), stop_reason="infrastructure")
    assert raw_of(turns_judged("looked", (*PAIR, broken))) == ((1.0, 0.0), (0.0, 0.0), (None,))


@pytest.mark.parametrize("name", ["too_few", "turns_invalid", "turns_broken", "turns_slow"])
def test_turns_without_valid_scores_are_unscored_for_a_reason_that_names_the_function(name):
    group = turns_judged(name, limit_s=0.05 if name == "turns_slow" else 60.0)
    assert (raw_of(group), ending(group)) == (((None, None),) * 2, "ready")
    assert all(f"{MODULE}:{name}" in one.failure and "\n" not in one.failure for one in group.trajectories)


def test_a_scorer_that_fails_at_every_attempt_ends_the_run(monkeypatch):
    """It does so in a row only: a function that sometimes fails costs no more than its attempts."""
    monkeypatch.setattr("reward.scorers.custom.MAX_FAILURES", 2)
    scorer = CustomTurnScorer(f"{MODULE}:turns_invalid", limit_s=60.0)
    for answer, score in (("yes", None), ("0", 0.0), ("yes", None)):
        [raw] = asyncio.run(scorer.score_group(Group(id="g", trajectories=(replace(PAIR[0], answer=answer),)))).raw
        assert raw == (score, score)
    with pytest.raises(OwnCodeError, match=f"{MODULE}:turns_broken"):
        turns_judged("turns_broken")


@pytest.mark.parametrize(
    ("score", "name"),
    [
        *((lambda name: score_answer(task(name), "a"), name) for name in ("alone", "number", "missing")),
        *((turns_judged, name) for name in ("half", "missing")),
    ],
)
def test_a_function_that_cannot_be_called_ends_the_run_with_one_line_that_names_it(score, name):
    with pytest.raises(OwnCodeError, match=f"{MODULE}:{name}") as caught:
        score(name)
    assert "\n" not in str(caught.value)


def test_a_recipe_with_a_turn_scorer_has_no_prm():
    config = load_run_config(None, [CREDIT])
    assert (config.trains_prm, config.reward.prm, config.names_code) == (False, None, True)
    assert config.reward.turn_scorer == f"{MODULE}:looked"
    with pytest.raises(Exception, match="prm_path"):
        load_run_config(None, [CREDIT.replace("}", ', prm_path="runs/r/prm"}')])
