"""The laws that hold alike in each of the endpoint's three protocols."""

import json

import httpx
import pytest
from endpoint_play import ADD, RULES, called, play, user
from scripted import text_of

from tests.changed import replace

SCHEMA = ADD["function"]["parameters"]
RESPONSES_TOOL = {"type": "function", "name": "add", "parameters": SCHEMA}
MESSAGES_TOOL = {"name": "add", "input_schema": SCHEMA}
BODIES = {
    "chat/completions": {"messages": [user("1")]},
    "responses": {"input": "1"},
    "messages": {"messages": [user("1")], "max_tokens": 64},
}
JSON_SCHEMA = {"type": "json_schema", "schema": SCHEMA}
UNENFORCED = {"type": "json_schema", "schema": SCHEMA | {"not": {"required": ["b"]}}}
ONE, TWO = called('{"a": 1}'), called('{"a": 1}', '{"a": 2}')


async def post(p, path, **changes):
    headers = {"authorization": f"Bearer {p.attempt.key}"}
    body = {"model": "policy", **BODIES[path], **changes}
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(f"{p.endpoint.base_url}/{path}", json=body, headers=headers)


FORMS = [
    ("chat/completions", {"response_format": {"type": "json_object"}}, '{"a": 1}'),
    ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": JSON_SCHEMA}}, '{"a": 1}'),
    ("chat/completions", {"response_format": {"type": "json_object"}, "tools": [ADD]}, ONE),
    ("chat/completions", {"tools": [ADD], "tool_choice": "required"}, TWO),
    ("chat/completions", {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}, ONE),
    ("responses", {"text": {"format": JSON_SCHEMA | {"name": "s"}}}, '{"a": 1}'),
    ("responses", {"text": {"format": JSON_SCHEMA | {"name": "s"}}, "tools": [RESPONSES_TOOL]}, TWO),
    ("responses", {"tools": [RESPONSES_TOOL], "tool_choice": {"type": "function", "name": "add"}}, ONE),
    ("messages", {"output_config": {"format": JSON_SCHEMA}}, '{"a": 1}'),
    ("messages", {"output_config": {"format": JSON_SCHEMA}, "tools": [MESSAGES_TOOL]}, TWO),
    ("messages", {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}}, TWO),
]


@pytest.mark.parametrize(("path", "form", "written"), FORMS)
async def test_requested_form_is_the_grammar_of_sampling_and_of_the_record(path, form, written):
    from xgrammar.testing import _is_grammar_accept_string

    async with play(written) as p:
        assert (await post(p, path, **form)).status_code == 200
        grammar = p.engine.requests[0].grammar
        assert _is_grammar_accept_string(grammar, written)
        assert not _is_grammar_accept_string(grammar, "four")
        assert (await p.attempt.end())[0].grammar == grammar


REFUSED = {
    "chat/completions": [
        *({"temperature": 0.2}, {"top_p": 0.9}, {"presence_penalty": 0.5}, {"logit_bias": {"5": 1}}, {"n": 2}),
        {"response_format": {"type": "json_schema", "json_schema": UNENFORCED}},
        *({"top_k": 5}, {"messages": []}, {"messages": [{"role": ["user"], "content": "1"}]}),
        {"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]},
        {"messages": [user("1"), {"role": "assistant", "content": "a", "reasoning_content": "Hm."}, user("2")]},
    ],
    "responses": [
        *({"temperature": 0.2}, {"top_p": 0.5}, {"background": True}, {"conversation": "conv_1"}, {"input": []}),
        *({"tools": [{"type": "web_search"}]}, {"tool_choice": "required"}, {"text": {"verbosity": "low"}}),
        {"tools": [RESPONSES_TOOL], "tool_choice": {"type": "function", "name": "sub"}},
        {"text": {"format": UNENFORCED}},
        {"input": [{"type": "function_call", "name": "a", "arguments": "{}", "namespace": "n"}]},
        *({"max_output_tokens": 0}, {"previous_response_id": "resp_of_another_attempt"}),
        {"input": [user([{"type": "input_text", "text": "1", "style": "bold"}])]},
    ],
    "messages": [
        *({"temperature": 0.2}, {"top_k": 5}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        *({"container": "c"}, {"max_tokens": None}, {"output_config": {"effort": "low"}}, {"messages": []}),
        {"output_config": {"format": UNENFORCED}},
        {"tools": [{"type": "web_search_20250305", "name": "w"}]},
        {"tools": [MESSAGES_TOOL | {"defer_loading": True}]},
        {"messages": [user("1"), {"role": "assistant", "content": "It"}]},
        {"messages": [user([{"type": "text", "text": "1", "citations": [{"cited_text": "2"}]}])]},
        *({"messages": [user([{"type": "image"}])]}, {"messages": [user([{"type": "thinking"}])]}),
    ],
}


@pytest.mark.parametrize(("path", "changed"), [(path, changed) for path in REFUSED for changed in REFUSED[path]])
async def test_request_that_would_be_sampled_or_recorded_otherwise_is_refused_by_name(path, changed):
    async with play("a") as p:
        answer = await post(p, path, **changed)
        error = answer.json()["error"]
        assert answer.status_code == 400
        (name,) = changed.keys() - {"tools"} or {"tools"}
        assert name.removesuffix("s") in f"{error.get('param')} {error['message']}"
        assert p.engine.requests == []


@pytest.mark.parametrize("path", BODIES)
async def test_a_full_context_is_recorded(path):
    async with play("a", rules=replace(RULES, max_context_tokens=10)) as p:
        assert (await post(p, path)).status_code == 400
        assert p.attempt.out_of_context


@pytest.mark.parametrize("path", BODIES)
async def test_half_a_surrogate_pair_becomes_a_question_mark(path):
    """JSON can hold one, and no tokenizer can read it."""
    half = {"input": "half \ud83d"} if path == "responses" else {"messages": [user("half \ud83d")]}
    async with play("4") as p, httpx.AsyncClient(trust_env=False) as client:
        content = json.dumps({"model": "policy", **BODIES[path], **half})
        headers = {"authorization": f"Bearer {p.attempt.key}", "content-type": "application/json"}
        assert (await client.post(f"{p.endpoint.base_url}/{path}", headers=headers, content=content)).is_success
        (turn,) = await p.attempt.end()
        assert text_of(turn.prompt_token_ids) == "<s>user:half ?<e><s>assistant:"


@pytest.mark.parametrize("depth", [99, 101, 3000])
async def test_arguments_that_are_nested_deep_are_a_call_or_text(depth):
    written = called('{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}")
    tools = {"chat/completions": ADD, "responses": RESPONSES_TOOL, "messages": {"name": "add", "input_schema": {}}}
    async with play(*[written] * 3) as p:
        for path, tool in tools.items():
            reply = await post(p, path, tools=[tool])
            assert reply.status_code == 200
            assert ("<tool_call>" in reply.text) == (depth > 100)
        assert len(await p.attempt.end()) == 3
