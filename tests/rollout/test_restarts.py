"""Where forks go on from, when a replay is exact, and how a group in lockstep waits for the decision."""

import asyncio
from dataclasses import replace

import pytest
from test_lockstep import ScriptedBatchEngine, ask

from configs.rollout import FirstCallRestartsConfig, RandomRestartsConfig
from envs.types import Task, ToolCall, ToolResult
from rollout.engines.wrappers import GroupEngine, LockstepEngine
from rollout.restarts import Anchor, as_fork, beginnings, choose_anchor, repeats
from rollout.types import Completion, Trajectory, TrajectoryGroup, Turn

TASK = Task(id="t", dataset="chain", question="?", answer="1")


def turn(action, *, prompt=(1,), text="found", error=None):
    return Turn(
        role="planner",
        prompt_token_ids=prompt,
        completion=Completion(token_ids=(1,), logprobs=(0.0,), text="", finish_reason="stop", policy_version=0),
        trainable=True,
        tool_call=ToolCall(name=action, arguments="x"),
        tool_result=None if action == "answer" else ToolResult(text=text, error=error),
    )


def trajectory(index, *turns):
    return Trajectory(id=f"g/{index}", group_id="g", task=TASK, turns=turns, answer=None, stop_reason="answered")


def group(*roots, name="g"):
    return TrajectoryGroup(id=name, task=TASK, trajectories=tuple(trajectory(at, *own) for at, own in enumerate(roots)))


SEARCH, CODE, THINK, ANSWER = map(turn, ("search", "code", "think", "answer"))
BROKEN = turn("code", error="NameError")


def test_rule_goes_on_after_the_first_tool_call_that_worked():
    roots = group((ANSWER,), (THINK, BROKEN, SEARCH, CODE, ANSWER), (CODE,))
    anchor = choose_anchor(roots, FirstCallRestartsConfig(), seed=0)
    assert anchor == Anchor(trajectory_id="g/1", num_turns=3, source="first_call")


def test_random_anchors_are_beginnings_without_an_answer_that_leave_a_turn():
    roots = [group((SEARCH, CODE, ANSWER), (ANSWER,), (BROKEN, SEARCH), name=f"g{at}") for at in range(100)]
    found = {choose_anchor(one, RandomRestartsConfig(), seed=0) for one in roots}
    assert {(one.trajectory_id, one.num_turns) for one in found} == {("g/0", 1), ("g/0", 2), ("g/2", 1)}


@pytest.mark.parametrize("config", [FirstCallRestartsConfig(), RandomRestartsConfig()])
def test_group_of_guesses_has_no_anchor(config):
    assert choose_anchor(group((ANSWER,), (ANSWER,)), config, seed=0) is None


def test_anchor_is_the_same_for_the_same_group_and_seed():
    roots = group(*[(SEARCH, CODE, ANSWER)] * 8)
    first, again, other = (choose_anchor(roots, RandomRestartsConfig(), seed=seed) for seed in (0, 0, 3))
    assert first == again != other


def test_replay_is_exact_where_results_and_the_next_prompt_are_those_of_the_record():
    root = trajectory(0, SEARCH, turn("code", prompt=(1, 2)))
    fork = trajectory(8, replace(SEARCH, trainable=False, tool_s=1.0), turn("answer", prompt=(1, 2)))
    assert repeats(fork, root, 1)
    assert not repeats(trajectory(8, turn("search", text="other"), ANSWER), root, 1)
    assert not repeats(trajectory(8, SEARCH, turn("answer", prompt=(1, 3))), root, 1)
    assert not repeats(trajectory(8), root, 1)


def test_a_fork_that_ends_with_the_record_or_goes_on_elsewhere_is_none():
    root = trajectory(0, SEARCH, turn("code", prompt=(1, 2)), turn("answer", prompt=(1, 2, 3)))
    assert not repeats(trajectory(8, SEARCH), root, 1)
    assert repeats(trajectory(8, SEARCH, turn("answer", prompt=(1, 2, 3))), root, 1)


def test_a_planner_that_broke_before_it_said_anything_new_is_a_fork_that_cannot_be_scored():
    root = trajectory(0, SEARCH, CODE, turn("answer", prompt=(1, 2)))
    broken = [replace(trajectory(8, *turns), stop_reason="infrastructure") for turns in ((), (SEARCH,), (SEARCH, CODE))]
    assert all(repeats(one, root, 2) for one in broken)
    other = turn("search", text="other")
    assert not repeats(replace(trajectory(8, other), stop_reason="infrastructure"), root, 2)
    assert not repeats(replace(broken[1], failure="the agent does not repeat the attempt"), root, 2)


def test_repeated_turns_come_first_in_the_order_of_the_record_and_are_not_trained():
    """Calls that are asked side by side may come in another order."""
    first, second, third = turn("search", prompt=(1,)), turn("search", prompt=(2,)), turn("code", prompt=(3,))
    checked = replace(third, role="verifier", completion=replace(third.completion))
    new = replace(third, completion=replace(third.completion))
    fork = as_fork(trajectory(8, second, checked, new, first), [first, second])
    assert fork.turns == (
        replace(first, trainable=False),
        checked,
        replace(second, trainable=False),
        new,
    )


SAID = replace(SEARCH, tool_call=None, tool_result=None)
"""A turn of an agent of one's own in which it calls nothing."""
BOTH = turn("search, search", text="one\ntwo")


def test_an_agent_of_ones_own_that_only_chats_has_beginnings_but_no_first_call():
    roots = group((SAID, SAID, SAID), (SAID,))
    assert choose_anchor(roots, FirstCallRestartsConfig(), seed=0) is None
    assert [(one.id, num_turns) for one, num_turns in beginnings(roots)] == [("g/0", 1), ("g/0", 2)]


def test_several_calls_in_a_turn_of_an_agent_of_ones_own_are_a_first_call():
    unread = replace(SEARCH, tool_result=None)
    roots = group((SAID, SAID), (unread, BOTH, SAID))
    assert choose_anchor(roots, FirstCallRestartsConfig(), seed=0).num_turns == 2


async def test_batches_wait_until_it_is_decided_whether_a_group_goes_on():
    """Else what is sampled together would depend on how long judging takes, and no run would be reproducible."""
    engine = ScriptedBatchEngine()
    lockstep = LockstepEngine(engine, seed=0)
    lockstep.begin_round(3)
    first, second = GroupEngine(lockstep, 2), GroupEngine(lockstep, 1)
    waiting = asyncio.create_task(second.generate(ask("b/0")))
    for name in ("a/0", "a/1"):
        first.release(name)
    await asyncio.sleep(0)
    assert engine.batches == []
    first.extend(2)
    forks = [asyncio.create_task(first.generate(ask(name))) for name in ("a/2", "a/3")]
    await asyncio.gather(waiting, *forks)
    assert engine.batches == [["a/2", "a/3", "b/0"]]
    waiting = asyncio.create_task(second.generate(ask("b/0")))
    for name in ("a/2", "a/3"):
        first.release(name)
    await asyncio.sleep(0)
    assert len(engine.batches) == 1
    first.close("a")
    await waiting
    assert engine.batches[1:] == [["b/0"]]
    second.release("b/0")
    second.close("b")
    lockstep.begin_round(1)
