"""OpenAI's Responses at the endpoint: the official client asks, and what was sampled is what is recorded."""

from itertools import pairwise

from endpoint_play import ADD, anthropic_client, called, play, user
from scripted import text_of

TOOL = {"type": "function"} | ADD["function"] | {"strict": False}


async def ask(p, given, **more):
    return await p.client.responses.create(**{"model": "policy", "input": given} | more)


async def test_a_previous_response_is_gone_on_from_without_its_instructions():
    async with play("a", "b", "c") as p:
        first = await ask(p, "1", instructions="Be brief.")
        second = await ask(p, "2", instructions="Be brief.", previous_response_id=first.id)
        third = await ask(p, "3", instructions="Be long.", previous_response_id=second.id)
        one, two, three = await p.attempt.end()
        own = one.prompt_token_ids + one.token_ids
        assert two.prompt_token_ids[: len(own)] == own
        assert text_of(three.prompt_token_ids) == (
            "<s>system:Be long.<e><s>user:1<e><s>assistant:a<e><s>user:2<e><s>assistant:b<e><s>user:3<e><s>assistant:"
        )
        assert third.previous_response_id == second.id


async def test_references_to_earlier_items_are_those_items():
    async with play("Hm. " + called('{"a": 1}'), "b") as p:
        first = await ask(p, "1", tools=[TOOL], include=["reasoning.encrypted_content"])
        words, call = first.output
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
        items = [user("1"), *({"type": "item_reference", "id": one.id} for one in (words, call)), output]
        await ask(p, items, tools=[TOOL])
        one, two = await p.attempt.end()
        own = one.prompt_token_ids + one.token_ids
        assert two.prompt_token_ids[: len(own)] == own


async def test_a_stream_brings_the_same_response_in_the_clients_events():
    async with play("four", "Hm. " + called('{"a": 1}')) as p:
        async with p.client.responses.stream(model="policy", input="2+2?") as stream:
            events = [event async for event in stream]
            whole = await stream.get_final_response()
        assert [event.sequence_number for event in events] == [*range(len(events))]
        assert [event.type.removeprefix("response.") for event in events] == [
            *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
            *("output_text.done", "content_part.done", "output_item.done", "completed"),
        ]
        assert (whole.output_text, whole.usage.output_tokens) == ("four", 5)
        async with p.client.responses.stream(model="policy", input="2+2?", tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            whole = await stream.get_final_response()
        assert kinds.count("response.output_item.done") == 2
        assert "response.function_call_arguments.done" in kinds
        assert (whole.output[0].content[0].text, whole.output[1].arguments) == ("Hm.", '{"a": 1}')
        assert [turn.trainable for turn in await p.attempt.end()] == [True, True]


async def test_the_assistants_words_and_calls_of_an_earlier_turn_are_one_message():
    async with play("a") as p:
        given = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "1"}]},
            {"role": "assistant", "content": "Hm."},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
        ]
        await ask(p, given)
        call = called('{"a": 1}')
        assert text_of(p.engine.requests[0].prompt_token_ids) == (
            f"<s>system:Be brief.<e><s>user:1<e><s>assistant:Hm.\n{call}<e>"
            "<s>user:<tool_response>\n1\n</tool_response><e><s>assistant:"
        )


async def test_one_attempt_may_speak_all_three_protocols_in_one_conversation():
    async with play(called('{"a": 1}'), "b", "c", "d") as p:
        first = await p.ask(user("1"), tools=[ADD])
        call = first.choices[0].message.tool_calls[0]
        tool = {"name": "add", "input_schema": ADD["function"]["parameters"]}
        use = {"type": "tool_use", "id": call.id, "name": "add", "input": {"a": 1}}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "1"}
        said = [user("1"), {"role": "assistant", "content": [use]}, user([result])]
        await anthropic_client(p).messages.create(model="policy", max_tokens=8, messages=said, tools=[tool])
        items = [
            user("1"),
            {"type": "function_call", "call_id": call.id, "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": call.id, "output": "1"},
            {"role": "assistant", "content": "b"},
            user("2"),
        ]
        third = await ask(p, items, tools=[TOOL])
        await ask(p, "3", tools=[TOOL], previous_response_id=third.id)
        turns = await p.attempt.end()
        for before, after in pairwise(turns):
            own = before.prompt_token_ids + before.token_ids
            assert after.prompt_token_ids[: len(own)] == own
        assert [turn.trainable for turn in turns] == [True] * 4
