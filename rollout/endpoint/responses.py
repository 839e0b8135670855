"""OpenAI's Responses protocol."""

from collections.abc import Iterator, Mapping

from rollout.endpoint import chat_completions
from rollout.endpoint.attempt import Attempt, Reply
from rollout.endpoint.messages import (
    ChatMessage,
    RequestError,
    call_of,
    fields_of,
    in_call_order,
    plain_text,
    unsupported,
)
from rollout.endpoint.request import Body, Fields, ModelRequest, build_request, read_fields

FIELDS = Fields(
    known=(
        *("model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls"),
        *("text", "stream", "temperature", "max_output_tokens", "user", "metadata", "store", "service_tier"),
        *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "stream_options"),
        "include",
    ),
    fixed={"truncation": "disabled", "background": False, "top_logprobs": 0},
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

Event = Mapping[str, object]


def read(body: object, attempt: Attempt) -> ModelRequest:
    """Read a request. Raises RequestError."""
    given = read_fields(body, attempt.rules, FIELDS)
    words = plain_text(given.get("instructions"), "instructions")
    instructions = [ChatMessage(role="system", content=words)] if words else []
    if given.get("include", []) not in ([], ["reasoning.encrypted_content"]):
        raise unsupported("include")  # a reply has no reasoning items, encrypted or not
    text = fields_of(given.get("text"))
    if text.get("verbosity") not in (None, "medium"):
        raise RequestError("text can only hold a format", param="text")
    return build_request(
        given,
        attempt.rules,
        messages=in_call_order([*instructions, *_before(given, attempt), *_input(given, attempt)]),
        form=text.get("format"),
        param="text.format",
        limit="max_output_tokens",
        num_instructions=len(instructions),
    )


def _before(given: Body, attempt: Attempt) -> tuple[ChatMessage, ...]:
    name = given.get("previous_response_id")
    if name is None:
        return ()
    messages = attempt.conversation_until(str(name).removeprefix("resp_"))
    if messages is None:
        raise RequestError(
            f"this attempt has no response {name!r}", code="previous_response_not_found", param="previous_response_id"
        )
    return messages


def _input(given: Body, attempt: Attempt) -> list[ChatMessage]:
    items = given.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise RequestError("input must be a text or a list with at least one item", param="input")
    messages: list[ChatMessage] = []
    for index, item in enumerate(items):
        fields = fields_of(item)
        if fields.get("type") == "item_reference":
            fields = _referred(str(fields.get("id")), attempt)
        _take(fields, f"input[{index}]", messages)
    return messages


def _referred(name: str, attempt: Attempt) -> Mapping[str, object]:
    """Return the item of an earlier reply that has this id."""
    reply = attempt.reply(name.split("_")[1]) if "_" in name else None
    item = next((item for item in (_output(reply) if reply else ()) if item["id"] == name), None)
    if item is None:
        raise RequestError(f"this attempt has no item {name!r}", code="item_not_found", param="input")
    return item


def _take(item: Mapping[str, object], where: str, messages: list[ChatMessage]) -> None:
    # Consecutive calls, and calls after the assistant's text, become one message.
    kind, role = item.get("type", "message"), chat_completions.ROLES.get(str(item.get("role")))
    call_ids: tuple[object, ...] = (item.get("call_id"),)
    if kind == "message" and role is not None and role != "tool":
        words = plain_text(item.get("content"), f"{where}.content")
        messages.append(ChatMessage(role=role, content=words.strip() if role == "assistant" else words))
    elif kind == "function_call" and "name" in item and "arguments" in item:
        before = ChatMessage(role="assistant", content="")
        if messages and messages[-1].role == "assistant":
            before = messages.pop()
        calls = (*before.calls, call_of(item["name"], item["arguments"]))
        call_ids = (*before.call_ids, *call_ids)
        messages.append(ChatMessage(role="assistant", content=before.content, calls=calls, call_ids=call_ids))
    elif kind == "function_call_output":
        output = plain_text(item.get("output"), f"{where}.output")
        messages.append(ChatMessage(role="tool", content=output, call_ids=call_ids))
    else:
        raise RequestError(
            f"{where} must be a message, a function_call with name and arguments, or a function_call_output",
            param="input",
        )


def whole(reply: Reply) -> Mapping[str, object]:
    """Return the response."""
    status = _status(reply)
    return _head(reply) | {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": _output(reply),
        "usage": {
            "input_tokens": reply.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
        },
    }


def _head(reply: Reply) -> dict[str, object]:
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "model": reply.request.body["model"],
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **{name: reply.request.body.get(name, absent) for name, absent in ECHOED.items()},
    }


def _status(reply: Reply) -> str:
    return "incomplete" if reply.completion.finish_reason == "length" else "completed"


def _output(reply: Reply) -> list[dict[str, object]]:
    message = reply.message
    calls: list[dict[str, object]] = [
        {
            "type": "function_call",
            "id": f"fc_{reply.id}_{name}",
            "call_id": f"call_{name}",
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for name, call in zip(reply.call_names, message.calls, strict=True)
    ]
    if calls and not message.content:
        return calls
    words = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": _status(reply)}
    return [{**words, "content": [_part(message.content)]}, *calls]


def _part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def events(reply: Reply) -> Iterator[Event]:
    """Yield the events of a stream."""
    for number, (kind, fields) in enumerate(_events(reply)):
        yield {"type": f"response.{kind}", "sequence_number": number, **fields}


def _events(reply: Reply) -> Iterator[tuple[str, Event]]:
    yield "created", {"response": _head(reply)}
    yield "in_progress", {"response": _head(reply)}
    for index, item in enumerate(_output(reply)):
        place: Event = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            text, part = reply.message.content, {**place, "content_index": 0}
            yield "output_item.added", {"output_index": index, "item": item | {"content": [], "status": "in_progress"}}
            yield "content_part.added", {**part, "part": _part("")}
            if text:
                yield "output_text.delta", {**part, "delta": text, "logprobs": []}
            yield "output_text.done", {**part, "text": text, "logprobs": []}
            yield "content_part.done", {**part, "part": _part(text)}
        else:
            name, arguments = item["name"], item["arguments"]
            yield (
                "output_item.added",
                {"output_index": index, "item": item | {"arguments": "", "status": "in_progress"}},
            )
            yield "function_call_arguments.delta", {**place, "delta": arguments}
            yield "function_call_arguments.done", {**place, "name": name, "arguments": arguments}
        yield "output_item.done", {"output_index": index, "item": item}
    yield _status(reply), {"response": whole(reply)}


def refusal(error: RequestError) -> Event:
    """Return the body of a rejection, and the event that ends a stream."""
    body = {"message": str(error), "code": error.code, "param": error.param}
    return {"type": "error", "sequence_number": 0, **body, **chat_completions.refusal(error)}
