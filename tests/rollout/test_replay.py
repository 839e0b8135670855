from dataclasses import replace

import pytest
from scripted import ScriptedEngine, ScriptedTool, decision, make_agent, make_task, run, text_of

from rollout.engines.engine import EngineError, GenerationRequest
from rollout.engines.wrappers import ReplayEngine
from rollout.replay import repeats

CODE, THINK, ANSWER = decision("code", "6*7"), decision("think", "hm"), decision("answer", "42")
EPISODE = ["rubbish", CODE, THINK, ANSWER]


class CountingTool(ScriptedTool):
    def __init__(self, result="42"):
        super().__init__("code", {"6*7": result})
        self.calls = []

    async def call(self, arguments):
        self.calls.append(arguments)
        return await super().call(arguments)


async def recorded(texts=EPISODE):
    return await run(make_agent(texts, max_steps=4))


def replaying(trajectory, num_turns, live, *, tool=None):
    """An agent that goes on from the first turns of a trajectory, and the engine that it asks after them."""
    agent = make_agent([], tools=[tool or CountingTool()], max_steps=4)
    engine = ScriptedEngine(live)
    return replace(agent, engine=ReplayEngine(engine, trajectory.planner_turns[:num_turns])), engine


def without_times(turns):
    return tuple(replace(turn, generate_s=0.0, tool_s=0.0) for turn in turns)


@pytest.mark.parametrize("num_turns", range(1, 4))
async def test_the_first_turns_come_from_the_record_and_the_rest_is_asked_for(num_turns):
    past = await recorded()
    agent, engine = replaying(past, num_turns, [THINK] * (3 - num_turns) + [decision("answer", "7")])
    again = await run(agent)
    assert without_times(again.planner_turns[:num_turns]) == without_times(past.planner_turns[:num_turns])
    assert len(engine.requests) == len(again.planner_turns) - num_turns
    assert (again.answer, again.stop_reason) == ("7", "answered")


async def test_the_first_live_turn_is_asked_for_after_exactly_the_replayed_past():
    past = await recorded()
    agent, engine = replaying(past, 2, [THINK, ANSWER])
    await run(agent)
    assert engine.requests[0].prompt_token_ids == past.planner_turns[2].prompt_token_ids
    assert "Invalid reply" in text_of(engine.requests[0].prompt_token_ids)


async def test_tools_run_again_so_that_their_state_is_that_of_the_past():
    tool = CountingTool()
    agent, _ = replaying(await recorded(), 2, [THINK, ANSWER], tool=tool)
    await run(agent)
    assert tool.calls == ["6*7"]


async def test_a_tool_that_answers_otherwise_this_time_is_what_the_planner_reads():
    agent, engine = replaying(await recorded(), 2, [THINK, ANSWER], tool=CountingTool("43"))
    again = await run(agent)
    assert again.planner_turns[1].tool_result.text == "43"
    assert "Result: 43\n" in text_of(engine.requests[0].prompt_token_ids)


async def test_sampled_tokens_and_their_version_are_those_of_the_record():
    past = await recorded()
    agent, engine = replaying(past, 2, [THINK, ANSWER])
    engine.policy_version = 8
    again = await run(agent)
    assert [turn.completion.policy_version for turn in again.planner_turns] == [3, 3, 8, 8]
    assert again.planner_turns[0].completion is past.planner_turns[0].completion


async def test_a_turn_that_was_cut_is_replayed_as_cut():
    past = await recorded([CODE + "…", CODE, ANSWER])
    agent, _ = replaying(past, 1, [ANSWER])
    again = await run(agent)
    assert again.turns[0].format_error == "the reply was cut because it was too long"


async def test_a_whole_record_is_played_without_any_engine():
    past = await recorded()
    agent, engine = replaying(past, 4, [])
    again = await run(agent)
    assert (without_times(again.turns), again.answer) == (without_times(past.turns), past.answer)
    assert engine.requests == []


async def test_another_model_than_the_planner_is_never_answered_from_the_record():
    past = await recorded()
    engine = ScriptedEngine(["continue"])
    replay = ReplayEngine(engine, past.planner_turns)
    request = GenerationRequest(
        trajectory_id="g/0", prompt_token_ids=(5,), max_tokens=4, temperature=0.0, use_adapter=False
    )
    assert (await replay.generate(request)).text == "continue"
    assert engine.requests == [request]


async def test_the_end_of_an_episode_is_told_to_the_engine_behind():
    agent, engine = replaying(await recorded(), 2, [THINK, ANSWER])
    await run(agent, make_task())
    assert engine.released == ["g/0"]


@pytest.mark.parametrize("live", [[EngineError("gone")], ["rubbish"] * 6])
async def test_an_end_that_breaks_in_its_first_new_turn_is_one_of_the_record_whatever_broke(live):
    past = await recorded()
    agent, _ = replaying(past, 2, live)
    end = await run(agent)
    assert (end.stop_reason == "infrastructure") == (live != ["rubbish"] * 6)
    assert repeats(end, past, 2)
