"""Anthropic's Messages protocol."""

import json
from collections.abc import Iterator, Mapping, Sequence

from rollout.endpoint.attempt import Attempt, Reply
from rollout.endpoint.messages import (
    ChatMessage,
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
    texts,
    tools_and_grammar,
    whole_number,
)

PATH = "/v1/messages"
FIELDS = Fields(
    read=(
        *("model", "messages", "system", "max_tokens", "tools", "tool_choice", "stop_sequences", "stream"),
        *("temperature", "output_config"),
    ),
    idle=("metadata", "service_tier", "cache_control"),
    fixed={"thinking": {"type": "disabled"}},
    neutral={"top_p": 1, "top_k": 0},
)
FUNCTION = ("type", "name", "description", "input_schema", "strict", "cache_control")
USE = ("type", "id", "name", "input", "cache_control")
RESULT = ("type", "tool_use_id", "content", "is_error", "cache_control")
FAILED = "The call failed."
"""Prefix of a result that is an error."""

KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


def read(body: object, attempt: Attempt) -> ModelRequest:
    """Read a request. Raises RequestError."""
    rules = attempt.rules
    given = read_fields(body, rules, FIELDS)
    limit = whole_number(given, "max_tokens", 1)
    if limit is None:
        raise RequestError("max_tokens must be given", param="max_tokens")
    tools, grammar = tools_and_grammar(functions_of(given, _parts), _choice(given), _form(given), rules)
    return ModelRequest(
        fingerprint=fingerprint("messages", given),
        messages=_messages(given),
        tools=tools,
        grammar=grammar,
        max_tokens=min(limit, rules.max_tokens),
        stop=texts(given, "stop_sequences"),
        stream=given.get("stream") is True,
    )


def _messages(given: Mapping[str, object]) -> tuple[ChatMessage, ...]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message")
    read = [one for index, message in enumerate(messages) for one in _read(fields_of(message), f"messages[{index}]")]
    if read and read[-1].role == "assistant":
        raise RequestError("the last message is the assistant's; prefilled replies are not supported")
    system = plain_text(given.get("system"), "system")
    return (*([ChatMessage(role="system", content=system)] if system else []), *in_call_order(read))


def _read(message: Mapping[str, object], where: str) -> Iterator[ChatMessage]:
    # Each tool result becomes a separate message.
    role = message.get("role")
    if role not in ("system", "user", "assistant"):
        raise RequestError(f"{where}.role must be one of system, user, assistant")
    check_fields(message, where, ("role", "content"))
    blocks = _blocks(message.get("content"), f"{where}.content")
    if role == "assistant":
        yield _assistant(blocks, where)
        return
    words: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if role == "user" and block.get("type") == "tool_result":
            if words:
                yield ChatMessage(role=role, content="".join(words))
                words = []
            check_fields(block, place, RESULT)
            result = plain_text(block.get("content"), f"{place}.content")
            if block.get("is_error"):
                result = f"{FAILED}\n{result}".rstrip("\n")
            yield ChatMessage(role="tool", content=result, call_ids=(block.get("tool_use_id"),))
        else:
            words.append(plain_text(block, place))
    if words or not blocks:
        yield ChatMessage(role=role, content="".join(words))


def _assistant(blocks: Sequence[Mapping[str, object]], where: str) -> ChatMessage:
    uses: list[Mapping[str, object]] = []
    words = ""
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if block.get("type") == "tool_use":
            check_fields(block, place, USE)
            uses.append(block)
        else:
            words += plain_text(block, place)
    if not all("name" in use and "input" in use for use in uses):
        raise RequestError(f"{where}.content has a tool_use without a name or an input")
    calls = tuple(call_of(use["name"], json.dumps(use["input"])) for use in uses)
    return ChatMessage(
        role="assistant", content=words.strip(), calls=calls, call_ids=tuple(use.get("id") for use in uses)
    )


def _blocks(content: object, where: str) -> list[Mapping[str, object]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise RequestError(f"{where} must be a text or a list of blocks")
    return content


def _parts(tool: Mapping[str, object], where: str) -> tuple[object, object, object]:
    if tool.get("type", "custom") != "custom":
        raise unsupported(f"{where}.type = {tool['type']}")
    for name in tool:
        if name not in FUNCTION:
            raise unsupported(f"{where}.{name}")
    return tool.get("name"), tool.get("description"), tool.get("input_schema")


def _choice(given: Mapping[str, object]) -> Choice:
    choice = given.get("tool_choice", {"type": "auto"})
    choice = choice if isinstance(choice, Mapping) else {"type": choice}
    single = "tool_choice" if choice.get("disable_parallel_tool_use") is True else None
    match choice:
        case {"type": "tool", "name": name}:
            return Choice(kind="named", name=name)
        case {"type": "any"}:
            return Choice(kind="required", single=single)
        case {"type": "auto" | "none" as kind}:
            return Choice(kind=kind, single=single)
        case _:
            raise RequestError("tool_choice must be auto, any, none or tool with a name", param="tool_choice")


def _form(given: Mapping[str, object]) -> str | None:
    config = given.get("output_config", {})
    match {name: value for name, value in config.items() if value is not None} if isinstance(config, Mapping) else None:
        case {"format": {"type": "json_schema", "schema": schema}, **more} if not more:
            return form_grammar({"type": "json_schema", "schema": schema}, "output_config.format")
        case {**more} if not more:
            return None
    raise RequestError("output_config can only hold a format, json_schema with a schema", param="output_config")


def whole(reply: Reply, request: ModelRequest, model: str) -> dict[str, object]:
    return _head(reply, model) | {
        "content": _content(reply),
        "stop_reason": _stop_reason(reply),
        "stop_sequence": reply.stopped_at,
    }


def _content(reply: Reply) -> list[dict[str, object]]:
    words = [{"type": "text", "text": reply.message.content}] if reply.message.content else []
    uses = [
        {"type": "tool_use", "id": f"toolu_{name}", "name": call.name, "input": json.loads(call.arguments)}
        for name, call in zip(reply.call_names, reply.message.calls, strict=True)
    ]
    return [*words, *uses]


def _head(reply: Reply, model: str) -> dict[str, object]:
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "usage": {"input_tokens": reply.num_prompt_tokens, "output_tokens": len(reply.completion.token_ids)},
    }


def _stop_reason(reply: Reply) -> str:
    if reply.message.calls:
        return "tool_use"
    if reply.stopped_at is not None:
        return "stop_sequence"
    return "max_tokens" if reply.completion.finish_reason == "length" else "end_turn"


def events(reply: Reply, request: ModelRequest, model: str) -> Iterator[str]:
    started = _head(reply, model) | {"content": [], "stop_reason": None, "stop_sequence": None}
    yield named_event({"type": "message_start", "message": started})
    for index, block in enumerate(_content(reply)):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield named_event({"type": "content_block_start", "index": index, "content_block": empty})
        yield named_event({"type": "content_block_delta", "index": index, "delta": delta})
        yield named_event({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stopped_at}
    usage = {"output_tokens": len(reply.completion.token_ids)}
    yield named_event({"type": "message_delta", "delta": ended, "usage": usage})
    yield named_event({"type": "message_stop"})


def refusal(error: RequestError) -> dict[str, object]:
    # Clients recognise a full context by this prefix.
    full = error.code == "context_length_exceeded"
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": f"{'prompt is too long: ' * full}{error}"}}


def refusal_event(error: RequestError) -> str:
    return named_event(refusal(error))
