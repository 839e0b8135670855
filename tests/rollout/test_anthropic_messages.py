"""Anthropic's Messages at the endpoint: the official client asks, and what was sampled is what is recorded."""

from dataclasses import replace

import anthropic
import httpx
import pytest
from endpoint_play import ADD, called, play, user
from scripted import ScriptedEngine, text_of

TOOL = {"name": "add", "input_schema": ADD["function"]["parameters"]}
FORM = {"format": {"type": "json_schema", "schema": TOOL["input_schema"]}}


class Stopped(ScriptedEngine):
    """Ends with a text of the request's, of which its own text has nothing."""

    async def generate(self, request):
        completion = await super().generate(request)
        ids = (*completion.token_ids[:-1], *map(ord, request.stop[-1]))
        return replace(completion, token_ids=ids, logprobs=(-1.0,) * len(ids))


def client_of(p, **more):
    connections = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    given = {"api_key": p.attempt.key, "max_retries": 0} | more
    return anthropic.AsyncAnthropic(
        base_url=p.endpoint.base_url.removesuffix("/v1"), http_client=connections, **given
    ).messages


async def ask(p, *messages, **more):
    return await client_of(p).create(**{"model": "policy", "max_tokens": 64, "messages": [*messages]} | more)


@pytest.mark.parametrize("order", [1, -1])
async def test_parallel_uses_of_tools_and_their_results_go_on_from_the_sampled_ids(order):
    async with play("Well. " + called('{"a": 1}', '{"a":2}'), "3") as p:
        first = await ask(p, user("1+2?"), tools=[TOOL])
        assert first.stop_reason == "tool_use"
        assert first.content[0].text == "Well."
        uses = first.content[1:]
        assert [(use.name, use.input) for use in uses] == [("add", {"a": 1}), ("add", {"a": 2})]
        results = [
            {"type": "tool_result", "tool_use_id": uses[0].id, "content": "0"},
            {"type": "tool_result", "tool_use_id": uses[1].id, "content": [{"type": "text", "text": "1"}]},
        ]
        results = [*results[::order], {"type": "text", "text": "Sum?"}]
        said = {"role": "assistant", "content": first.content}
        await ask(p, user("1+2?"), said, {"role": "user", "content": results}, tools=[TOOL])
        one, two = await p.attempt.end()
        own = one.prompt_token_ids + one.token_ids
        assert two.prompt_token_ids[: len(own)] == own
        assert text_of(two.prompt_token_ids[len(own) :]) == (
            "<s>user:<tool_response>\n0\n</tool_response>\n<tool_response>\n1\n</tool_response><e>"
            "<s>user:Sum?<e><s>assistant:"
        )
        assert one.tool_result.text == "0\n1"


@pytest.mark.parametrize(
    ("asked", "written"),
    [
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, called('{"a": 1}', '{"a": 2}')),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}}, called('{"a": 1}')),
        ({"output_config": FORM}, '{"a": 1}'),
        ({"output_config": FORM, "tools": [TOOL]}, '{"a": 1}'),
        ({"output_config": FORM, "tools": [TOOL]}, called('{"a": 1}', '{"a": 2}')),
    ],
)
async def test_the_form_that_is_asked_for_is_a_grammar_of_the_sampling_and_of_the_record(asked, written):
    from xgrammar.testing import _is_grammar_accept_string

    async with play(written) as p:
        await ask(p, user("1"), **asked)
        grammar = p.engine.requests[0].grammar
        assert _is_grammar_accept_string(grammar, written)
        assert not _is_grammar_accept_string(grammar, "four")
        assert (await p.attempt.end())[0].grammar == grammar


async def test_a_stream_brings_the_same_message_in_the_clients_events():
    async with play("four", "Hm. " + called('{"a": 1}')) as p:
        body = {"model": "policy", "max_tokens": 64, "messages": [user("2+2?")]}
        async with client_of(p).stream(**body) as stream:
            assert "".join([text async for text in stream.text_stream]) == "four"
            whole = await stream.get_final_message()
        assert (whole.stop_reason, whole.usage.output_tokens) == ("end_turn", 5)
        async with client_of(p).stream(**body, tools=[TOOL]) as stream:
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
        reply = await ask(p, user("1"), stop_sequences=["Thought:", "Observation:"])
        assert p.engine.requests[0].stop == ("Thought:", "Observation:")
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "Observation:")


# --- the same laws --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "status", "kind", "says"),
    [
        ({"model": "claude"}, 404, "not_found_error", "agent.model names the policy"),
        ({"temperature": 0.2}, 400, "invalid_request_error", "temperature = 0.2"),
        ({"top_p": 0.5}, 400, "invalid_request_error", "top_p = 0.5"),
        ({"top_k": 5}, 400, "invalid_request_error", "top_k = 5"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 400, "invalid_request_error", "thinking can only"),
        ({"container": "c"}, 400, "invalid_request_error", "'container' is not supported"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens must be given"),
        ({"output_config": {"effort": "low"}}, 400, "invalid_request_error", "output_config can only"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "w"}]},
            400,
            "invalid_request_error",
            "web_search_20250305",
        ),
        ({"tools": [TOOL | {"defer_loading": True}]}, 400, "invalid_request_error", "defer_loading"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, 400, "invalid_request_error", "'sub'"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "needs tools"),
        ({"messages": []}, 400, "invalid_request_error", "at least one message"),
        ({"messages": [user("1"), {"role": "assistant", "content": "It"}]}, 400, "invalid_request_error", "prefilled"),
        ({"messages": [user("1") | {"name": "critic"}]}, 400, "invalid_request_error", "'messages[0].name' is not"),
        (
            {"messages": [user([{"type": "text", "text": "1", "citations": [{"cited_text": "2"}]}])]},
            *(400, "invalid_request_error", "'messages[0].content[0].citations' is not"),
        ),
        ({"messages": [user([{"type": "image"}])]}, 400, "invalid_request_error", "other than text"),
        ({"messages": [user([{"type": "thinking"}])]}, 400, "invalid_request_error", "other than text"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name_in_the_protocols_shape(changed, status, kind, says):
    async with play("a") as p:
        body = {"model": "policy", "max_tokens": 8, "messages": [user("1")]} | changed
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.post(
                f"{p.endpoint.base_url}/messages", json=body, headers={"x-api-key": p.attempt.key}
            )
        told = answer.json()
        assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
        assert says in told["error"]["message"]
        assert p.engine.requests == []
