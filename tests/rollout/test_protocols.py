"""The laws that hold alike in each of the endpoint's three protocols."""

import asyncio
import json

import httpx
import pytest
from endpoint_play import ADD, RULES, called, play, user
from scripted import text_of

from rollout.endpoint import server
from rollout.endpoint.server import MAX_BODY_BYTES
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


async def post(p, path, *, content=None, **changes):
    headers = {"authorization": f"Bearer {p.attempt.key}", "content-type": "application/json"}
    content = content or json.dumps({"model": "policy", **BODIES[path], **changes})
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(f"{p.endpoint.base_url}/{path}", content=content, headers=headers)


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
        *({"max_output_tokens": 0}, {"previous_response_id": "resp_of_another_attempt"}, {"include": ["logprobs"]}),
        *({"input": [{"type": "item_reference", "id": name}]} for name in ("msg_x", "x")),
        {"tools": [{"type": "custom", "name": "run"}]},
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
async def test_half_a_surrogate_pair_becomes_a_question_mark(path):
    """JSON can hold one, and no tokenizer can read it."""
    half = {"input": "half \ud83d"} if path == "responses" else {"messages": [user("half \ud83d")]}
    async with play("4") as p:
        assert (await post(p, path, **half)).is_success
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


TOOLS = {"chat/completions": ADD, "responses": RESPONSES_TOOL, "messages": MESSAGES_TOOL}
ENDS = {
    "chat/completions": ("finish_reason", {"stop": "stop", "calls": "tool_calls", "length": "length"}),
    "responses": ("status", {"stop": "completed", "calls": "completed", "length": "incomplete"}),
    "messages": ("stop_reason", {"stop": "end_turn", "calls": "tool_use", "length": "max_tokens"}),
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("written", "end", "num_calls"),
    [
        *(("four", "stop", 0), ("four…", "length", 0), (ONE, "calls", 1), (TWO, "calls", 2), (f"{ONE}…", "length", 1)),
        *((f'{ONE}\n<tool_call>\n{{"name": "add", "argum…', "length", 1), (f"{ONE} and…", "length", 1)),
        *((f"<think>{ONE}…", "length", 0), (f"<think>{ONE}</think>4", "stop", 0)),
    ],
)
async def test_every_protocol_says_what_ended_a_reply(path, stream, written, end, num_calls):
    async with play(written) as p:
        reply = await post(p, path, tools=[TOOLS[path]], stream=stream)
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
        objects = [*map(json.loads, lines)] if stream else [reply.json()]
        field, ends = ENDS[path]
        said = (
            [objects[-1].get("response", objects[-1])["status"]] if path == "responses" else values_of(field, objects)
        )
        assert {*said} - {None} == {ends[end]}
        calls = [*values_of("call_id", objects), *values_of("id", objects)]
        named = {call for call in calls if call.startswith(("call_", "toolu_"))}
        assert len(named) == num_calls


def values_of(name, value):
    """All values of a field, at any depth, in order."""
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in [*[inner][: key == name], *values_of(name, inner)]]
    return [found for inner in value for found in values_of(name, inner)] if isinstance(value, list) else []


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("rule", "status", "bound", "setting"),
    [
        ({"max_calls": 0}, 403, "calls", "rollout.max_calls"),
        ({"max_context_tokens": 10}, 400, "context", "rollout.engine.max_model_len"),
    ],
)
async def test_a_call_beyond_a_bound_is_refused_by_its_setting(path, stream, rule, status, bound, setting):
    async with play("a", rules=replace(RULES, **rule)) as p:
        refused = await post(p, path, stream=stream)
        assert (refused.status_code, p.attempt.used_up) == (status, bound)
        assert setting in p.attempt.refusal in refused.json()["error"]["message"]
        is_forbidden = path == "messages" and status == 403
        assert refused.json()["error"]["type"] == ("permission_error" if is_forbidden else "invalid_request_error")
        assert (p.engine.requests, await p.attempt.end()) == ([], [])


NESTED = pytest.param("[" * 200_000 + "]" * 200_000, id="nested")


@pytest.mark.parametrize("path", [*BODIES, "answer"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", NESTED])
async def test_a_body_with_what_is_no_number_of_json_or_nested_without_end_is_refused(path, number):
    content = json.dumps({"model": "policy", "answer": "4", **BODIES.get(path, {}), "metadata": {"a": ["x"]}})
    async with play("a") as p:
        assert (await post(p, path, content=content.replace('"x"', number))).status_code == 400
        assert (p.engine.requests, p.attempt.posted.done()) == ([], False)


@pytest.mark.parametrize("path", [*BODIES, "answer"])
@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_body_beyond_the_limit_is_refused_before_it_is_read_to_its_end(path, is_declared):
    async def pieces():
        for _ in range(3):
            yield b" " * (MAX_BODY_BYTES // 2)

    async with play("a") as p:
        refused = await post(p, path, content=b" " * (MAX_BODY_BYTES + 1) if is_declared else pieces())
        assert refused.status_code == 413
        assert (await post(p, "chat/completions")).status_code == 200


async def test_more_than_the_bodies_of_all_may_have_at_a_time_is_asked_for_again(monkeypatch):
    async with play("a") as p:
        monkeypatch.setattr(server, "MAX_RECEIVED_BYTES", 9)
        assert (await post(p, "chat/completions")).status_code == 503
        monkeypatch.undo()
        assert (await post(p, "chat/completions")).status_code == 200


@pytest.mark.parametrize("path", BODIES)
async def test_a_text_that_cannot_fit_is_not_tokenized_and_a_large_one_that_may_is_read_like_a_small_one(path):
    def asking(text):
        return {"input": text} if path == "responses" else {"messages": [user(text)]}

    async with play("a", "b", rules=replace(RULES, max_context_tokens=100_000)) as p:
        large, small = await asyncio.gather(post(p, path, **asking("x" * 80_000)), post(p, path, **asking("x")))
        assert {large.status_code, small.status_code} == {200}
        p.attempt._chat = None
        assert (await post(p, path, **asking("x" * 3_300_000))).status_code == 400
        assert p.attempt.used_up == "context"
        turns = await p.attempt.end()
        assert sorted(text_of(one.prompt_token_ids).count("x") for one in turns) == [1, 80_000]
