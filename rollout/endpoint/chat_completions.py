"""OpenAI's Chat Completions protocol."""

from collections.abc import Iterator, Mapping

from envs.types import ToolCall
from rollout.endpoint.attempt import Attempt, Reply
from rollout.endpoint.messages import (
    AssistantMessage,
    ChatMessage,
    ChatRole,
    RequestError,
    call_of,
    check_fields,
    fields_of,
    in_call_order,
    openai_assistant,
    plain_text,
)
from rollout.endpoint.request import (
    Choice,
    Fields,
    ModelRequest,
    event,
    fingerprint,
    form_grammar,
    functions_of,
    read_fields,
    texts,
    tools_and_grammar,
    whole_number,
    word_choice,
)

PATH = "/v1/chat/completions"
ROLES: Mapping[str, ChatRole] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
MESSAGE = ("role", "content", "id", "name")
ASSISTANT = (*MESSAGE, "tool_calls", "parsed", "weight")
RESULT = (*MESSAGE, "tool_call_id")
"""Fields of the messages of each role. Multi-agent clients send a speaker's `name`, which chat templates ignore;
`weight` is of OpenAI's fine-tuning files, `parsed` of its client."""
CALL, FUNCTION = ("id", "type", "index", "function"), ("name", "arguments", "parsed_arguments")
FIELDS = Fields(
    read=(
        *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "stream"),
        *("stream_options", "seed", "temperature", "max_tokens", "max_completion_tokens", "stop", "n"),
    ),
    idle=("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    fixed={"logprobs": False, "top_logprobs": 0, "modalities": ["text"]},
    neutral={"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}},
)


def read(body: object, attempt: Attempt) -> ModelRequest:
    """Read a request. Raises RequestError."""
    rules = attempt.rules
    given = read_fields(body, rules, FIELDS)
    if given.get("n", 1) != 1:
        raise RequestError("n must be 1: send n requests instead", code="unsupported_value", param="n")
    tools, grammar = tools_and_grammar(functions_of(given, _parts), _choice(given), _form(given), rules)
    limit = whole_number(given, "max_completion_tokens", 1) or whole_number(given, "max_tokens", 1)
    options = given.get("stream_options", {})
    return ModelRequest(
        fingerprint=fingerprint("chat", given),
        messages=read_messages(given.get("messages")),
        tools=tools,
        grammar=grammar,
        max_tokens=min(limit or rules.max_tokens, rules.max_tokens),
        seed=whole_number(given, "seed"),
        stop=texts(given, "stop"),
        stream=given.get("stream") is True,
        with_usage=isinstance(options, Mapping) and options.get("include_usage") is True,
    )


def read_messages(messages: object) -> tuple[ChatMessage, ...]:
    """Read the messages of a request. Raises RequestError."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", param="messages")
    return in_call_order(_message(fields_of(message), f"messages[{index}]") for index, message in enumerate(messages))


def _message(message: Mapping[str, object], where: str) -> ChatMessage:
    role = ROLES.get(str(message.get("role")))
    if role is None:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}", param="messages")
    content = plain_text(message.get("content"), f"{where}.content")
    if role != "assistant":
        check_fields(message, where, RESULT if role == "tool" else MESSAGE)
        return ChatMessage(
            role=role, content=content, call_ids=(message.get("tool_call_id"),) if role == "tool" else ()
        )
    if message.get("function_call") is not None:
        raise RequestError(f"{where}.function_call is deprecated; use tool_calls", param="messages")
    check_fields(message, where, ASSISTANT)
    given = message.get("tool_calls") or []
    calls = given if isinstance(given, list) else [given]
    return ChatMessage(
        role=role,
        content=content.strip(),
        calls=tuple(_call(call, where) for call in calls),
        call_ids=tuple(fields_of(call).get("id") for call in calls),
    )


def _call(call: object, where: str) -> ToolCall:
    match call:
        case {"function": {"name": name, "arguments": arguments} as function}:
            check_fields(fields_of(call), f"{where}.tool_calls", CALL)
            check_fields(fields_of(function), f"{where}.tool_calls.function", FUNCTION)
            return call_of(name, arguments)
    raise RequestError(f"{where}.tool_calls must be function calls, each with a name and arguments", param="messages")


def _parts(tool: Mapping[str, object], where: str) -> tuple[object, object, object]:
    fields = fields_of(tool.get("function"))
    return fields.get("name"), fields.get("description"), fields.get("parameters")


def _choice(given: Mapping[str, object]) -> Choice:
    match given.get("tool_choice"):
        case {"function": {"name": name}}:
            return Choice(kind="named", name=name)
    return word_choice(given)


def _form(given: Mapping[str, object]) -> str | None:
    form = given.get("response_format", {"type": "text"})
    if fields_of(form).get("type") == "json_schema":
        form = {**fields_of(fields_of(form).get("json_schema")), "type": "json_schema"}
    return form_grammar(form, "response_format")


def whole(reply: Reply, request: ModelRequest, model: str) -> dict[str, object]:
    choice = {"index": 0, "message": message_of(reply), "logprobs": None, "finish_reason": _finish_reason(reply)}
    return _head(reply, "chat.completion", model) | {"choices": [choice], "usage": _usage(reply)}


def message_of(reply: Reply) -> AssistantMessage:
    return openai_assistant(reply.message, [f"call_{name}" for name in reply.call_names])


def events(reply: Reply, request: ModelRequest, model: str) -> Iterator[str]:
    head = _head(reply, "chat.completion.chunk", model)
    message = message_of(reply)
    deltas: list[Mapping[str, object]] = [{"role": "assistant", "content": ""}]
    if message["content"]:
        deltas.append({"content": message["content"]})
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(message.get("tool_calls", []))]
    for delta, finish_reason in (*((delta, None) for delta in deltas), ({}, _finish_reason(reply))):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        yield event(head | {"choices": [choice]})
    if request.with_usage:
        yield event(head | {"choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def _head(reply: Reply, kind: str, model: str) -> dict[str, object]:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": reply.created,
        "model": model,
        "system_fingerprint": f"v{reply.completion.policy_version}",
    }


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.message.calls else reply.completion.finish_reason


def _usage(reply: Reply) -> dict[str, int]:
    prompt, sampled = reply.num_prompt_tokens, len(reply.completion.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def refusal(error: RequestError) -> dict[str, object]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def refusal_event(error: RequestError) -> str:
    return event(refusal(error))
