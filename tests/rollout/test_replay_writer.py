"""An attempt that goes on from another: its first calls are answered from the record, and whoever asks something else
is refused."""

import asyncio

import anthropic
import openai
import pytest
from endpoint_play import ADD, GatedEngine, called, play, until, user
from scripted import ScriptedEngine

from tests.changed import replace

RESULT = {"role": "tool", "tool_call_id": "call_0_0", "content": "2"}


class Odd(ScriptedEngine):
    """Samples ids that no tokenizer would make of its texts, with log-probs of their own."""

    async def generate(self, request):
        completion = await super().generate(request)
        ids = (900 + len(self.requests), *completion.token_ids)
        return replace(completion, token_ids=ids, logprobs=(-2.0, *completion.logprobs))


async def go_through(p):
    """A call of a function, its result, and one question more."""
    asked = [user("1+1?")]
    first = (await p.ask(*asked, tools=[ADD])).choices[0].message
    asked += [first.model_dump(exclude_none=True), RESULT]
    second = (await p.ask(*asked, tools=[ADD])).choices[0].message
    asked += [second.model_dump(exclude_none=True), user("Sure?")]
    return (await p.ask(*asked, tools=[ADD])).choices[0].message.content


async def recorded(play_it=go_through, texts=None):
    async with play(engine=Odd(texts or [called('{"a": 1}'), "2", "yes"])) as p:
        await play_it(p)
        return await p.attempt.end()


async def say_side_by_side(p, *questions):
    """One after the other, in this order, without waiting for replies."""
    asking = []
    for question in questions:
        num_asked = len(p.attempt._calls)
        asking.append(asyncio.ensure_future(p.ask(user(question))))
        await until(lambda before=num_asked: len(p.attempt._calls) > before)
    return [reply.choices[0].message.content for reply in await asyncio.gather(*asking)]


async def refusal_of(asking):
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        await asking
    assert caught.value.code == "not_repeated"
    return str(caught.value)


@pytest.mark.parametrize("num_turns", [1, 2])
async def test_the_first_calls_get_the_recorded_replies_and_the_rest_is_sampled(num_turns):
    past = await recorded()
    live = ["2", "no"][num_turns - 1 :]
    async with play(*live, recorded=(past, num_turns)) as p:
        assert await go_through(p) == "no"
        again = await p.attempt.end()
    assert len(p.engine.requests) == 3 - num_turns
    for one, other in zip(again[:num_turns], past, strict=False):
        assert one.completion == other.completion
        assert (one.prompt_token_ids, one.tool_call, one.tool_result) == (
            *(other.prompt_token_ids, other.tool_call),
            other.tool_result,
        )
    assert again[num_turns].prompt_token_ids == past[num_turns].prompt_token_ids
    assert p.engine.released == ["g/0"]


async def ask_by_responses(p):
    return (await p.client.responses.create(model="policy", input="1+1?")).output_text


async def ask_claude(p):
    connections = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    base_url = p.endpoint.base_url.removesuffix("/v1")
    claude = anthropic.AsyncAnthropic(base_url=base_url, api_key=p.attempt.key, http_client=connections)
    async with claude:
        return (await claude.messages.create(model="policy", max_tokens=8, messages=[user("1+1?")])).content[0].text


@pytest.mark.parametrize("ask", [ask_by_responses, ask_claude])
async def test_every_protocol_is_answered_from_the_record(ask):
    past = await recorded(ask, ["2"])
    async with play(recorded=(past, 1)) as p:
        assert await ask(p) == "2"
        assert p.engine.requests == []


async def test_another_question_is_refused_at_once_and_nothing_more_is_said():
    past = await recorded()
    async with play("2", recorded=(past, 2)) as p, p.client_with(max_retries=2) as patient:
        asked = [user("1+1?")]
        await p.ask(*asked, tools=[ADD])
        later = [*asked, {"role": "assistant", "content": "Hm."}, user("What time is it?")]
        said = await refusal_of(patient.chat.completions.create(model="policy", messages=later, tools=[ADD]))
        same = len(past[0].prompt_token_ids)
        assert f"first {same} of this prompt's {same + 38} tokens" in said
        assert "the agent does not repeat" in p.attempt.broken
        await refusal_of(p.ask(*asked, tools=[ADD]))
        assert (len(await p.attempt.end()), p.engine.requests) == (1, [])


async def test_one_call_more_than_the_attempt_made_is_refused_until_something_new_was_said():
    past = await recorded(lambda p: say_side_by_side(p, "a", "b"), ["A", "B"])
    async with play("new", "other", recorded=(past, 1)) as p:
        await say_side_by_side(p, "a")
        await refusal_of(p.ask(user("a")))
    async with play("new", "other", recorded=(past, 1)) as p:
        assert await say_side_by_side(p, "a", "b") == ["A", "new"]
        assert await say_side_by_side(p, "whatever follows from that") == ["other"]


async def test_a_reply_that_is_sampled_while_another_call_is_refused_is_no_turn():
    past = await recorded(lambda p: say_side_by_side(p, "a", "b"), ["A", "B"])
    engine = GatedEngine(["new"])
    async with play(engine=engine, recorded=(past, 1)) as p:
        waiting = asyncio.ensure_future(p.ask(user("b")))
        await until(lambda: engine.requests)
        await refusal_of(p.ask(user("c")))
        engine.gate.set()
        await refusal_of(waiting)
        assert await p.attempt.end() == []
