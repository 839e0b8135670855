"""A scorer of one's own: what it says goes all the way, what it may not say ends in one line."""

import asyncio
import sys
import threading
import time

import pytest

from configs.learner import LearnerConfig
from configs.plugins import OwnCodeError
from envs.types import Task
from learner.advantages import group_normalized
from reward.collected import outcome_of
from reward.judging import GroupJudge, OutcomeReward, group_summary
from reward.scorers import score_answer
from reward.scorers.custom import scorer_of
from rollout.filters import ending_of
from rollout.types import Group, Trajectory
from tests.changed import replace

SCORERS = """
import asyncio
import time

def half(task, answer):
    return 0.5 if task.metadata["wants"] in answer else False

def by_length(task, answer):
    return len(answer) / 10

def turns(task, answer, turns):
    return len(turns) == 0

def unsure(task, answer):
    return None if answer == "?" else 1

def nothing_like_it(task, answer):
    return {"nan": float("nan"), "two": 2.0, "text": "1", "list": [1]}[answer]

def broken(task, answer):
    raise KeyError("no such word")

def slow(task, answer):
    time.sleep(5)

async def later(task, answer):
    await asyncio.sleep(0)
    return 0.25

async def later_broken(task, answer):
    await asyncio.sleep(0)
    raise KeyError("no such word")

async def never(task, answer):
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(task.id)

ended = []
met = asyncio.Event()

async def together(task, answer):
    # The first waits until the second is asked.
    if answer == "b":
        met.set()
    await met.wait()
    return 1.0

async def places(task, answer):
    return asyncio.get_running_loop() is loops.setdefault("loop", asyncio.get_running_loop())

loops = {}

def kind(task, answer):
    import numpy as np
    return {"float32": np.float32(0.5), "bool": np.bool_(True), "int": np.int64(1)}[answer]

def alone(task):
    return 1.0

number = 3
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_scorers_of_the_test.py").write_text(SCORERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_scorers_of_the_test", raising=False)
    scorer_of.cache_clear()


def task(name, **further):
    scorer = f"own_scorers_of_the_test:{name}"
    return Task(id="t1", dataset="mine", question="?", answer="x", scorer=scorer, metadata={"wants": "o"}, **further)


def attempt(name, answer, index=0):
    return Trajectory(id=f"g/{index}", group_id="g", task=task(name), turns=(), answer=answer, stop_reason="answered")


def group_of(name, *answers):
    attempts = tuple(attempt(name, answer, index) for index, answer in enumerate(answers))
    return Group(id="g", trajectories=attempts)


def test_the_function_sees_the_task_with_its_columns_and_a_bool_is_a_score():
    assert score_answer(task("half"), "foo") == 0.5
    assert score_answer(task("half"), "bar") == 0.0
    assert score_answer(task("turns"), "bar") == 1.0


@pytest.mark.parametrize("answer", [None, "", " \n"])
def test_no_answer_scores_zero_without_asking(answer):
    """A blank one is what an agent of one's own returns where it has none."""
    assert score_answer(task("broken"), answer) == 0.0


def test_a_task_may_name_a_built_in_comparison_and_a_wrong_name_is_answered():
    whole = Task(id="t", dataset="mine", question="?", answer="1,000", scorer="integer")
    assert (score_answer(whole, "1000"), score_answer(whole, "1000.0")) == (1.0, 0.0)
    with pytest.raises(OwnCodeError, match=r"scorer 'intger' of task 't' is none; .*did you mean 'integer'\?"):
        score_answer(replace(whole, scorer="intger"), "1")


@pytest.mark.parametrize(
    ("name", "answer", "says"),
    [
        ("nothing_like_it", "nan", r"returned nan for task 't1'; a score is a number from 0 to 1"),
        ("nothing_like_it", "two", r"returned 2\.0 for task 't1'"),
        ("nothing_like_it", "text", r"returned '1' for task 't1'"),
        ("nothing_like_it", "list", r"returned \[1\] for task 't1'"),
        ("broken", "a", r"failed on task 't1' with KeyError: 'no such word' \(own_scorers_of_the_test\.py, line 21\)"),
        ("later_broken", "a", r"failed on task 't1' with KeyError: 'no such word'"),
        ("alone", "a", r"is called as alone\(task, answer\) and does not take that"),
        ("number", "a", r"is a int; name a function"),
        ("missing", "a", r"cannot be imported: AttributeError"),
    ],
)
def test_what_is_no_score_is_one_line_that_names_function_and_task(name, answer, says):
    with pytest.raises(OwnCodeError, match=says) as caught:
        score_answer(task(name), answer)
    assert f"own_scorers_of_the_test:{name}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_function_that_takes_too_long_is_given_up():
    with pytest.raises(OwnCodeError, match=r"gave no score for task 't1' within 0\.05 s; .*raise reward\.timeout_s"):
        score_answer(task("slow", scoring_limit_s=0.05), "a")


def test_an_asynchronous_scorer_is_waited_for_and_all_share_one_loop():
    assert score_answer(task("later"), "a") == 0.25
    assert [score_answer(task("places"), "a") for _ in range(2)] == [1.0, 1.0]


def test_an_asynchronous_scorer_that_takes_too_long_is_given_up_and_ended():
    import own_scorers_of_the_test

    with pytest.raises(OwnCodeError, match=r"gave no score for task 't1' within 0\.05 s"):
        score_answer(task("never", scoring_limit_s=0.05), "a")
    deadline = time.monotonic() + 60
    while not own_scorers_of_the_test.ended:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_asynchronous_scorer_that_begins_after_it_was_given_up_is_ended(monkeypatch):
    """Regression: its thread had not told yet what there was to cancel, and nobody did."""
    submit, begun, submitted = asyncio.run_coroutine_threadsafe, threading.Event(), []

    def late(*given):
        assert begun.wait(60)
        submitted.append(submit(*given))
        return submitted[0]

    monkeypatch.setattr("reward.scorers.custom.asyncio.run_coroutine_threadsafe", late)
    with pytest.raises(OwnCodeError, match=r"gave no score for task 't1' within 0\.05 s"):
        score_answer(task("never", scoring_limit_s=0.05), "a")
    begun.set()
    deadline = time.monotonic() + 60
    while not (submitted and submitted[0].cancelled()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_attempts_of_a_group_are_scored_side_by_side():
    assert judged(group_of("together", "a", "b")).outcomes == [1.0, 1.0]


@pytest.mark.parametrize(("answer", "score"), [("float32", 0.5), ("bool", 1.0), ("int", 1.0)])
def test_numbers_of_numpy_are_numbers(answer, score):
    assert score_answer(task("kind"), answer) == score


def judged(group):
    asyncio.run(GroupJudge(OutcomeReward(LearnerConfig(), max_turn_tokens=100)).judge(group))
    return group


def ending(group):
    return ending_of(group.outcomes, group.totals)


def test_scores_between_zero_and_one_give_signal_and_advantages():
    scored = judged(group_of("by_length", "aa", "aaaa", "aaaaaa", "aaaaaaaa"))
    assert scored.outcomes == [0.2, 0.4, 0.6, 0.8]
    assert ending(scored) == "ready"
    # Mean 0.5, sample deviation 0.2582.
    advantages = group_normalized(scored.totals)
    assert advantages == pytest.approx([-1.1619, -0.3873, 0.3873, 1.1619], abs=1e-3)
    result = group_summary(scored, duration_s=0.0, prm_s=0.0)
    assert (result.facts["right"], result.right, result.scored) == (
        pytest.approx(2.0),
        pytest.approx(2.0),
        len(scored.outcomes),
    )
    assert ending(judged(group_of("by_length", "aa", "bb"))) != "ready"


def test_an_answer_of_which_the_scorer_cannot_tell_is_unscored_and_counted_not_wrong():
    scored = judged(group_of("unsure", "?", "?"))
    assert (scored.outcomes, ending(scored)) == ([None, None], None)
    assert group_summary(scored, duration_s=0.0, prm_s=0.0).reason == "2 of 2 answered, without a score"
    assert outcome_of(attempt("unsure", "?")) is None


def test_a_failing_scorer_ends_the_judgement_instead_of_failing_the_group():
    with pytest.raises(OwnCodeError):
        judged(group_of("broken", "a", "b"))
