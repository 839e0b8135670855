"""Where the comparison of restarts goes on from, and by which threshold."""

import random

import pytest

from benchmarks.restart_yield import (
    Anchor,
    Thresholds,
    after_first_call,
    deepest_passed,
    new_root,
    random_prefix,
    youden,
)
from envs.types import Task, ToolCall, ToolResult
from rollout.types import Completion, Trajectory, TrajectoryGroup, Turn

TASK = Task(id="t", dataset="chain", question="?", answer="1")
RNG = random.Random(0)


def turn(action: str, *, error: str | None = None) -> Turn:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), text="", finish_reason="stop", policy_version=0)
    return Turn(
        role="planner",
        prompt_token_ids=(1,),
        completion=completion,
        trainable=True,
        tool_call=ToolCall(name=action, arguments="x"),
        tool_result=ToolResult(text="", error=error) if action != "answer" else None,
    )


def group(*roots: tuple[Turn, ...]) -> TrajectoryGroup:
    trajectories = tuple(
        Trajectory(id=str(at), group_id="g", task=TASK, turns=turns, answer=None, stop_reason="answered")
        for at, turns in enumerate(roots)
    )
    return TrajectoryGroup(id="g", task=TASK, trajectories=trajectories)


SEARCH, CODE, ANSWER, BROKEN = turn("search"), turn("code"), turn("answer"), turn("code", error="no")


def test_new_root_goes_on_from_nothing():
    assert new_root(group((ANSWER,)), [], RNG) == Anchor(0, 0)


def test_prefix_never_holds_an_answer_or_all_turns():
    siblings = group((SEARCH, CODE, ANSWER), (ANSWER,), (SEARCH, SEARCH))
    found = {random_prefix(siblings, [], RNG) for _ in range(200)}
    assert found == {Anchor(0, 1), Anchor(0, 2), Anchor(2, 1)}
    assert random_prefix(group((ANSWER,)), [], RNG) is None


def test_rule_goes_on_after_the_first_call_that_worked():
    assert after_first_call(group((ANSWER,), (BROKEN, SEARCH, ANSWER)), [], RNG) == Anchor(1, 2)
    assert after_first_call(group((BROKEN, ANSWER)), [], RNG) is None


def test_deepest_prefix_of_which_every_turn_passes_wins_and_ties_go_to_the_higher_product():
    siblings = group((SEARCH, CODE, ANSWER), (SEARCH, SEARCH, CODE, ANSWER), (SEARCH, SEARCH, ANSWER))
    scores = [[0.9, -1.0, 0.9], [0.9, 0.6, -1.0, 0.9], [0.9, 0.7, 0.9]]
    assert deepest_passed(siblings, scores, RNG) == Anchor(2, 2)
    assert deepest_passed(siblings, [[-1.0] * 4] * 3, RNG) is None


def test_threshold_parts_right_from_wrong_steps_best():
    assert youden([(0.2, False), (0.5, True), (0.6, False), (0.7, True), (0.8, True)]) == pytest.approx(0.7)
    assert youden([(0.2, True), (0.5, True)]) is None


def test_depth_without_a_threshold_of_its_own_uses_the_pooled_one():
    thresholds = Thresholds({0: 0.5}, pooled=0.8)
    assert thresholds.passed([0.5, 0.7, None, 0.9]) == [0.5, -1.0, -1.0, 0.9]
