"""Anthropic's Messages at the endpoint: the official client asks, and what was sampled is what is recorded."""

from dataclasses import replace

import anthropic
from endpoint_play import ADD, anthropic_client, called, play, user
from scripted import ScriptedEngine

TOOL = {"name": "add", "input_schema": ADD["function"]["parameters"]}


class Stopped(ScriptedEngine):
    """Ends with a text of the request's, of which its own text has nothing."""

    async def generate(self, request):
        completion = await super().generate(request)
        ids = (*completion.token_ids[:-1], *map(ord, request.stop[-1]))
        return replace(completion, token_ids=ids, logprobs=(-1.0,) * len(ids))


async def test_a_stream_brings_the_same_message_in_the_clients_events():
    async with play("four", "Hm. " + called('{"a": 1}')) as p:
        body = {"model": "policy", "max_tokens": 64, "messages": [user("2+2?")]}
        messages = anthropic_client(p).messages
        async with messages.stream(**body) as stream:
            assert "".join([text async for text in stream.text_stream]) == "four"
            whole = await stream.get_final_message()
        assert (whole.stop_reason, whole.usage.output_tokens) == ("end_turn", 5)
        async with messages.stream(**body, tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            whole = await stream.get_final_message()
        assert [kind for kind in kinds if kind.startswith("message")] == [
            *("message_start", "message_delta", "message_stop")
        ]
        assert kinds.count("content_block_stop") == 2
        assert (whole.content[0].text, whole.content[1].input) == ("Hm.", {"a": 1})
        assert [turn.trainable for turn in await p.attempt.end()] == [True, True]


async def test_the_sequence_that_ended_a_reply_is_named():
    async with play(engine=Stopped(["4"])) as p:
        stop = ["Thought:", "Observation:"]
        reply = await anthropic_client(p).messages.create(
            model="policy", max_tokens=64, messages=[user("1")], stop_sequences=stop
        )
        assert p.engine.requests[0].stop == ("Thought:", "Observation:")
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "Observation:")


async def test_the_clients_own_loop_over_tools_is_a_conversation():
    @anthropic.beta_async_tool
    async def add(a: int) -> str:
        """Add."""
        return str(a + 1)

    async with play(called('{"a": 1}'), "two") as p:
        body = {"model": "policy", "max_tokens": 64, "messages": [user("1+1?")]}
        last = await anthropic_client(p).beta.messages.tool_runner(**body, tools=[add]).until_done()
        assert last.content[0].text == "two"
        one, two = await p.attempt.end()
        own = one.prompt_token_ids + one.token_ids
        assert two.prompt_token_ids[: len(own)] == own
