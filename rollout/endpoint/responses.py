"""OpenAI's Responses protocol."""

from collections.abc import Iterator, Mapping

from rollout.endpoint import chat_completions
from rollout.endpoint.attempt import Attempt, Reply
from rollout.endpoint.messages import (
    ChatMessage,
    ChatRole,
    RequestError,
    call_of,
    check_fields,
    fields_of,
    in_call_order,
    plain_text,
    unsupported,
)
from rollout.endpoint.request import (
    Choice,
    Fields,
    ModelRequest,
    fingerprint,
    form_grammar,
    functions_of,
    named_event,
    read_fields,
    tools_and_grammar,
    whole_number,
    word_choice,
)

PATH = "/v1/responses"
ROLES: Mapping[str, ChatRole] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
ITEM = ("type", "id", "status")
MESSAGE = (*ITEM, "role", "content")
CALL = (*ITEM, "name", "arguments", "parsed_arguments", "call_id")
OUTPUT = (*ITEM, "output", "call_id", "name")
"""Fields of the items of an input."""
TEXTS = ("input_text", "output_text", "text")
FIELDS = Fields(
    read=(
        *("model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls"),
        *("text", "stream", "temperature", "max_output_tokens"),
    ),
    idle=(
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "stream_options"),
    ),
    fixed={"truncation": "disabled", "background": False, "top_logprobs": 0, "include": []},
    neutral={"top_p": 1},
)
ECHOED: Mapping[str, object] = {
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
}
"""Fields of a request that its reply repeats, with their defaults."""

Events = Iterator[tuple[str, Mapping[str, object]]]


def read(body: object, attempt: Attempt) -> ModelRequest:
    """Read a request. Raises RequestError."""
    rules = attempt.rules
    given = read_fields(body, rules, FIELDS)
    tools, grammar = tools_and_grammar(functions_of(given, _parts), _choice(given), _form(given), rules)
    instructions = _instructions(given)
    limit = whole_number(given, "max_output_tokens", 1)
    return ModelRequest(
        fingerprint=fingerprint("responses", given),
        messages=in_call_order((*instructions, *_before(given, attempt), *_input(given))),
        tools=tools,
        grammar=grammar,
        max_tokens=min(limit or rules.max_tokens, rules.max_tokens),
        stream=given.get("stream") is True,
        num_instructions=len(instructions),
        echo={name: given.get(name, absent) for name, absent in ECHOED.items()},
    )


def _instructions(given: Mapping[str, object]) -> tuple[ChatMessage, ...]:
    words = given.get("instructions", "")
    if not isinstance(words, str):
        raise RequestError("instructions must be a text", param="instructions")
    return (ChatMessage(role="system", content=words),) if words else ()


def _before(given: Mapping[str, object], attempt: Attempt) -> tuple[ChatMessage, ...]:
    name = given.get("previous_response_id")
    if name is None:
        return ()
    messages = attempt.conversation_until(str(name).removeprefix("resp_"), _call_id)
    if messages is None:
        raise RequestError(
            f"this attempt has no response {name!r}", code="previous_response_not_found", param="previous_response_id"
        )
    return messages


def _input(given: Mapping[str, object]) -> tuple[ChatMessage, ...]:
    items = given.get("input")
    if isinstance(items, str):
        return (ChatMessage(role="user", content=items),)
    if not isinstance(items, list) or not items:
        raise RequestError("input must be a text or a list with at least one item", param="input")
    messages: list[ChatMessage] = []
    for index, item in enumerate(items):
        _take(fields_of(item), f"input[{index}]", messages)
    return tuple(messages)


def _take(item: Mapping[str, object], where: str, messages: list[ChatMessage]) -> None:
    # Consecutive calls, and calls after the assistant's text, become one message.
    kind, role = item.get("type", "message"), ROLES.get(str(item.get("role")))
    if kind == "message" and role is not None:
        check_fields(item, where, MESSAGE)
        words = plain_text(item.get("content"), f"{where}.content", TEXTS)
        messages.append(ChatMessage(role=role, content=words.strip() if role == "assistant" else words))
    elif kind == "function_call" and "name" in item and "arguments" in item:
        check_fields(item, where, CALL)
        before = (
            messages.pop()
            if messages and messages[-1].role == "assistant"
            else ChatMessage(role="assistant", content="")
        )
        call = call_of(item["name"], item["arguments"])
        call_ids = (*before.call_ids, item.get("call_id"))
        messages.append(
            ChatMessage(role="assistant", content=before.content, calls=(*before.calls, call), call_ids=call_ids)
        )
    elif kind == "function_call_output":
        check_fields(item, where, OUTPUT)
        output = plain_text(item.get("output"), f"{where}.output", TEXTS)
        messages.append(ChatMessage(role="tool", content=output, call_ids=(item.get("call_id"),)))
    else:
        raise RequestError(
            f"{where} must be a message, a function_call with name and arguments, or a function_call_output",
            param="input",
        )


def _parts(tool: Mapping[str, object], where: str) -> tuple[object, object, object]:
    if tool.get("type") != "function":
        raise unsupported(f"{where}.type = {tool.get('type')}")
    return tool.get("name"), tool.get("description"), tool.get("parameters")


def _choice(given: Mapping[str, object]) -> Choice:
    match given.get("tool_choice"):
        case {"type": "function", "name": name}:
            return Choice(kind="named", name=name)
    return word_choice(given)


def _form(given: Mapping[str, object]) -> str | None:
    text = given.get("text", {})
    if not isinstance(text, Mapping) or text.get("verbosity") not in (None, "medium"):
        raise RequestError("text can only hold a format", param="text")
    return form_grammar(text.get("format") or {"type": "text"}, "text.format")


def whole(reply: Reply, request: ModelRequest, model: str) -> dict[str, object]:
    prompt, sampled = reply.num_prompt_tokens, len(reply.completion.token_ids)
    return _head(reply, request, model) | {
        "status": _status(reply),
        "incomplete_details": {"reason": "max_output_tokens"} if _status(reply) == "incomplete" else None,
        "output": _output(reply),
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def _head(reply: Reply, request: ModelRequest, model: str) -> dict[str, object]:
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "model": model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **request.echo,
    }


def _status(reply: Reply) -> str:
    return "incomplete" if reply.completion.finish_reason == "length" else "completed"


def _output(reply: Reply) -> list[dict[str, object]]:
    message = reply.message
    calls: list[dict[str, object]] = []
    for name, call in zip(reply.call_names, message.calls, strict=True):
        named = {"id": f"fc_{reply.id}_{name}", "call_id": _call_id(name)}
        given = {"name": call.name, "arguments": call.arguments}
        calls.append({"type": "function_call", "status": "completed", **named, **given})
    if calls and not message.content:
        return calls
    words = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": _status(reply)}
    return [{**words, "content": [_part(message.content)]}, *calls]


def _call_id(name: str) -> str:
    return f"call_{name}"


def _part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def events(reply: Reply, request: ModelRequest, model: str) -> Iterator[str]:
    for number, (kind, fields) in enumerate(_events(reply, request, model)):
        yield named_event({"type": f"response.{kind}", "sequence_number": number, **fields})


def _events(reply: Reply, request: ModelRequest, model: str) -> Events:
    head = _head(reply, request, model)
    yield "created", {"response": head}
    yield "in_progress", {"response": head}
    for index, item in enumerate(_output(reply)):
        empty: dict[str, object] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        yield "output_item.added", {"output_index": index, "item": {**item, **empty, "status": "in_progress"}}
        where: dict[str, object] = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            yield from _words(reply.message.content, where | {"content_index": 0})
        else:
            yield "function_call_arguments.delta", {**where, "delta": item["arguments"]}
            yield "function_call_arguments.done", {**where, "name": item["name"], "arguments": item["arguments"]}
        yield "output_item.done", {"output_index": index, "item": item}
    yield _status(reply), {"response": whole(reply, request, model)}


def _words(text: str, place: Mapping[str, object]) -> Events:
    yield "content_part.added", {**place, "part": _part("")}
    if text:
        yield "output_text.delta", {**place, "delta": text, "logprobs": []}
    yield "output_text.done", {**place, "text": text, "logprobs": []}
    yield "content_part.done", {**place, "part": _part(text)}


refusal = chat_completions.refusal


def refusal_event(error: RequestError) -> str:
    fields = {"message": str(error), "code": error.code, "param": error.param}
    return named_event({"type": "error", "sequence_number": 0, **fields})
