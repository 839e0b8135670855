"""An attempt that continues another: its first calls are answered from the record, and whoever asks something else
is refused."""

import openai
import pytest
from endpoint_play import ADD, OddEngine, called, play, user

from tests.changed import replace

RESULT = {"role": "tool", "tool_call_id": "call_0_0", "content": "2"}


async def go_through(p):
    """A call of a function, its result, and one question more."""
    asked = [user("1+1?")]
    first = (await p.ask(*asked, tools=[ADD])).choices[0].message
    asked += [first.model_dump(exclude_none=True), RESULT]
    second = (await p.ask(*asked, tools=[ADD])).choices[0].message
    asked += [second.model_dump(exclude_none=True), user("Sure?")]
    return (await p.ask(*asked, tools=[ADD])).choices[0].message.content


async def recorded():
    async with play(engine=OddEngine([called('{"a": 1}'), "2", "yes"])) as p:
        await go_through(p)
        return await p.attempt.end()


async def refusal_of(asking):
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        await asking
    assert caught.value.code == "not_repeated"


@pytest.mark.parametrize("num_turns", [1, 2])
async def test_the_first_calls_get_the_recorded_replies_and_the_rest_is_sampled(num_turns):
    past = await recorded()
    live = ["2", "no"][num_turns - 1 :]
    async with play(*live, recorded=(past, num_turns)) as p:
        assert await go_through(p) == "no"
        again = await p.attempt.end()
    assert len(p.engine.requests) == 3 - num_turns
    for one, other in zip(again[:num_turns], past, strict=False):
        assert replace(one, trainable=True, generate_s=0, tool_s=0) == replace(other, generate_s=0, tool_s=0)
    assert again[num_turns].prompt_token_ids == past[num_turns].prompt_token_ids
    assert p.engine.released == ["g/0"]


async def test_another_question_is_refused_at_once_and_nothing_more_is_said():
    past = await recorded()
    async with play("2", recorded=(past, 2)) as p, p.client_with(max_retries=2) as patient:
        asked = [user("1+1?")]
        await p.ask(*asked, tools=[ADD])
        later = [*asked, {"role": "assistant", "content": "Hm."}, user("What time is it?")]
        await refusal_of(patient.chat.completions.create(model="policy", messages=later, tools=[ADD]))
        assert p.attempt.broken
        await refusal_of(p.ask(*asked, tools=[ADD]))
        assert (len(await p.attempt.end()), p.engine.requests) == (1, [])
