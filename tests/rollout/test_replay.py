import pytest
from scripted import ScriptedEngine, decision, make_agent, run

from rollout.engines.engine import GenerationRequest
from rollout.engines.wrappers import ReplayEngine
from tests.changed import replace

CODE, THINK, ANSWER = decision("code", "6*7"), decision("think", "hm"), decision("answer", "42")
EPISODE = ["rubbish", CODE, THINK, ANSWER]


async def recorded():
    return await run(make_agent(EPISODE, max_steps=4))


def replaying(trajectory, num_turns, live):
    """An agent that continues from the first turns of a trajectory, and the engine that it asks after them."""
    agent = make_agent([], max_steps=4)
    engine = ScriptedEngine(live)
    return replace(agent, engine=ReplayEngine(engine, trajectory.planner_turns, num_turns)), engine


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


async def test_another_model_than_the_planner_is_never_answered_from_the_record():
    past = await recorded()
    engine = ScriptedEngine(["continue"])
    replay = ReplayEngine(engine, past.planner_turns, 3)
    request = GenerationRequest(
        trajectory_id="g/0", prompt_token_ids=(5,), max_tokens=4, temperature=0.0, use_adapter=False
    )
    assert (await replay.generate(request)).text == "continue"
    assert engine.requests == [request]
