"""OpenAI's Chat Completions protocol."""

from collections.abc import Iterator, Mapping

from envs.types import ToolCall
from rollout.endpoint.attempt import Attempt, Reply
from rollout.endpoint.messages import (
    ChatMessage,
    RequestError,
    Speaker,
    call_of,
    fields_of,
    in_call_order,
    openai_assistant,
    plain_text,
)
from rollout.endpoint.request import Fields, ModelRequest, build_request, read_fields, texts, whole_number

ROLES: Mapping[str, Speaker] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
FIELDS = Fields(
    known=(
        *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "stream"),
        *("stream_options", "seed", "temperature", "max_tokens", "max_completion_tokens", "stop", "n"),
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options"),
    ),
    fixed={"n": 1, "logprobs": False, "top_logprobs": 0, "modalities": ["text"]},
    neutral={"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}},
)


def read(body: object, attempt: Attempt) -> ModelRequest:
    """Read a request. Raises RequestError."""
    given = read_fields(body, attempt.rules, FIELDS)
    return build_request(
        given,
        attempt.rules,
        messages=read_messages(given.get("messages")),
        form=given.get("response_format"),
        param="response_format",
        limit="max_completion_tokens" if "max_completion_tokens" in given else "max_tokens",
        seed=whole_number(given, "seed"),
        stop=texts(given, "stop"),
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
    if role == "tool":
        return ChatMessage(role=role, content=content, call_ids=(message.get("tool_call_id"),))
    if role != "assistant":
        return ChatMessage(role=role, content=content)
    calls = message.get("tool_calls") or []
    calls = calls if isinstance(calls, list) else [calls]
    return ChatMessage(
        role=role,
        content=content.strip(),
        calls=tuple(_call(call, where) for call in calls),
        call_ids=tuple(fields_of(call).get("id") for call in calls),
    )


def _call(call: object, where: str) -> ToolCall:
    match call:
        case {"function": {"name": name, "arguments": arguments}}:
            return call_of(name, arguments)
    raise RequestError(f"{where}.tool_calls must be function calls, each with a name and arguments", param="messages")


def whole(reply: Reply) -> Mapping[str, object]:
    """Return the response."""
    message = openai_assistant(reply.message, [f"call_{name}" for name in reply.call_names])
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(reply)}
    return _head(reply, "chat.completion") | {"choices": [choice], "usage": _usage(reply)}


def events(reply: Reply) -> Iterator[Mapping[str, object] | str]:
    """Yield the chunks of a stream: the whole message, and its end."""
    head = _head(reply, "chat.completion.chunk")
    delta = openai_assistant(reply.message, [f"call_{name}" for name in reply.call_names])
    match delta:
        case {"tool_calls": [*calls]}:
            delta["tool_calls"] = [dict(fields_of(call), index=index) for index, call in enumerate(calls)]
    for piece, finish_reason in ((delta, None), ({}, _finish_reason(reply))):
        choice = {"index": 0, "delta": piece, "logprobs": None, "finish_reason": finish_reason}
        yield head | {"choices": [choice]}
    if fields_of(reply.request.body.get("stream_options")).get("include_usage") is True:
        yield head | {"choices": [], "usage": _usage(reply)}
    yield "[DONE]"


def _head(reply: Reply, kind: str) -> dict[str, object]:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": reply.created,
        "model": reply.request.body["model"],
        "system_fingerprint": f"v{reply.completion.policy_version}",
    }


def _finish_reason(reply: Reply) -> str:
    # A reply that was cut may lack a further call.
    ended = reply.completion.finish_reason
    return "tool_calls" if reply.message.calls and ended != "length" else ended


def _usage(reply: Reply) -> dict[str, int]:
    prompt, sampled = reply.num_prompt_tokens, reply.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def refusal(error: RequestError) -> Mapping[str, object]:
    """Return the body of a rejection, which also ends a stream."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
