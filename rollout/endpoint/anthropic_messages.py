"""Anthropic's Messages protocol."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rollout.endpoint.attempt import Attempt, Reply
from rollout.endpoint.chat_completions import ROLES
from rollout.endpoint.messages import (
    ChatMessage,
    RequestError,
    call_of,
    fields_of,
    in_call_order,
    plain_text,
    unsupported,
)
from rollout.endpoint.request import Body, Fields, ModelRequest, build_request, read_fields, texts

FIELDS = Fields(
    known=(
        *("model", "messages", "system", "max_tokens", "tools", "tool_choice", "stop_sequences", "stream"),
        *("temperature", "output_config", "metadata", "service_tier", "cache_control"),
    ),
    fixed={"thinking": {"type": "disabled"}},
    neutral={"top_p": 1, "top_k": 0},
)
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
"""Types of errors by their status."""
FAILED = "The call failed."
"""Prefix of a result that is an error."""


def read(body: object, attempt: Attempt) -> ModelRequest:
    """Read a request. Raises RequestError."""
    given = read_fields(body, attempt.rules, FIELDS)
    if "max_tokens" not in given:
        raise RequestError("max_tokens must be given", param="max_tokens")
    config = fields_of(given.get("output_config"))
    for name in config.keys() - {"format"}:
        raise unsupported(f"output_config.{name}")
    return build_request(
        given,
        attempt.rules,
        messages=_messages(given),
        form=config.get("format"),
        param="output_config.format",
        limit="max_tokens",
        stop=texts(given, "stop_sequences"),
    )


def _messages(given: Body) -> tuple[ChatMessage, ...]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message")
    read = [one for index, message in enumerate(messages) for one in _read(fields_of(message), f"messages[{index}]")]
    if read[-1].role == "assistant":
        raise RequestError("the last message is the assistant's; prefilled replies are not supported")
    system = plain_text(given.get("system"), "system")
    return in_call_order([*([ChatMessage(role="system", content=system)] if system else []), *read])


def _read(message: Mapping[str, object], where: str) -> Iterator[ChatMessage]:
    # Each tool result becomes a separate message.
    role, content = ROLES.get(str(message.get("role"))), message.get("content")
    blocks = content if isinstance(content, list) and content else [{"type": "text", "text": content or ""}]
    if role is None or role == "tool":
        raise RequestError(f"{where}.role must be one of system, user, assistant")
    if role == "assistant":
        yield _assistant([*map(fields_of, blocks)], f"{where}.content")
        return
    for is_result, group in groupby(map(fields_of, blocks), lambda block: block.get("type") == "tool_result"):
        if is_result and role == "user":
            yield from (_result(block, f"{where}.content") for block in group)
        else:
            yield ChatMessage(role=role, content=plain_text([*group], f"{where}.content"))


def _result(block: Mapping[str, object], where: str) -> ChatMessage:
    result = plain_text(block.get("content"), f"{where}.content")
    if block.get("is_error"):
        result = f"{FAILED}\n{result}".rstrip("\n")
    return ChatMessage(role="tool", content=result, call_ids=(block.get("tool_use_id"),))


def _assistant(blocks: Sequence[Mapping[str, object]], where: str) -> ChatMessage:
    uses = [block for block in blocks if block.get("type") == "tool_use"]
    if not all("name" in use and "input" in use for use in uses):
        raise RequestError(f"{where} has a tool_use without a name or an input")
    return ChatMessage(
        role="assistant",
        content=plain_text([block for block in blocks if block.get("type") != "tool_use"], where).strip(),
        calls=tuple(call_of(use["name"], use["input"]) for use in uses),
        call_ids=tuple(use.get("id") for use in uses),
    )


def whole(reply: Reply) -> Mapping[str, object]:
    """Return the response."""
    words = [{"type": "text", "text": reply.message.content}] if reply.message.content else []
    uses = [
        {"type": "tool_use", "id": f"toolu_{name}", "name": call.name, "input": json.loads(call.arguments)}
        for name, call in zip(reply.call_names, reply.message.calls, strict=True)
    ]
    return _head(reply) | {"content": [*words, *uses], **_end(reply)}


def _head(reply: Reply) -> dict[str, object]:
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": reply.request.body["model"],
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": reply.num_prompt_tokens, "output_tokens": reply.num_tokens},
    }


def _end(reply: Reply) -> dict[str, object]:
    # A reply that was cut may lack a further call, so this comes first.
    stop_reason = "end_turn"
    if reply.completion.finish_reason == "length":
        stop_reason = "max_tokens"
    elif reply.message.calls:
        stop_reason = "tool_use"
    elif reply.stopped_at is not None:
        stop_reason = "stop_sequence"
    return {"stop_reason": stop_reason, "stop_sequence": reply.stopped_at}


def events(reply: Reply) -> Iterator[Mapping[str, object]]:
    """Yield the events of a stream."""
    yield {"type": "message_start", "message": _head(reply)}
    blocks: list[tuple[dict[str, object], dict[str, object]]] = []
    if reply.message.content:
        delta: dict[str, object] = {"type": "text_delta", "text": reply.message.content}
        blocks.append(({"type": "text", "text": ""}, delta))
    for name, call in zip(reply.call_names, reply.message.calls, strict=True):
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        blocks.append(({"type": "tool_use", "id": f"toolu_{name}", "name": call.name, "input": {}}, delta))
    for index, (empty, delta) in enumerate(blocks):
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": _end(reply), "usage": {"output_tokens": reply.num_tokens}}
    yield {"type": "message_stop"}


def refusal(error: RequestError) -> Mapping[str, object]:
    """Return the body of a rejection, which also ends a stream."""
    # Clients recognise a full context by this prefix.
    full = error.code == "context_length_exceeded"
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body: dict[str, object] = {"type": kind, "message": f"{'prompt is too long: ' * full}{error}"}
    if error.param == "thread":  # without it the SDK's tool runner falls back to complete messages
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": body}
