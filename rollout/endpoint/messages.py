"""Messages of a conversation in one form for all protocols, and function calls as text.

A call is written as a JSON object between `<tool_call>` and `</tool_call>`, a result between `<tool_response>` and
`</tool_response>` in the user's turn: the form that Hermes and Qwen models are trained on, and any other can learn.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from configs.errors import check_depth
from envs.types import ToolCall
from rollout.chat import THOUGHTS
from rollout.types import ChatRole, Message

Speaker = ChatRole | Literal["tool"]
OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"
ARGUMENTS = ("arguments", "parameters", "input")
"""Names that models give to the arguments of a call. Llama 3 was trained on the second."""
_MARKS = re.compile("|".join(map(re.escape, [*THOUGHTS, *THOUGHTS.values()])) + r"|<tool_call>\s*(?=\{)")
_CLOSING = re.compile(r"\s*</tool_call>")
_MALFORMED = re.compile(r"\{.*?\}\s*</tool_call>", re.DOTALL)
PART_FIELDS = (
    *("type", "role", "content", "text", "id", "index", "status", "name", "weight", "tool_calls", "function"),
    *("tool_call_id", "call_id", "output", "tool_use_id", "is_error", "description", "strict"),
)
"""Fields of messages, tools and their parts. Multi-agent clients send a speaker's `name`, which chat templates ignore;
`weight` is of OpenAI's fine-tuning files."""
TEXTS = ("text", "input_text", "output_text")
"""Types of parts that are text."""
OPAQUE = (
    *("arguments", "parsed_arguments", "input", "parameters", "input_schema", "parsed", "logprobs"),
    *("cache_control", "prompt_cache_breakpoint"),
)
"""Fields whose content is any JSON value."""


class RequestError(Exception):
    """A rejected request; `code` and `param` are fields of OpenAI's error objects."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def unsupported(name: str, advice: str = "") -> RequestError:
    return RequestError(f"'{name}' is not supported{advice}", code="unsupported_parameter", param=name)


def check_parts(value: object, where: str) -> None:
    """Raise RequestError for a field of messages or tools that would be missing from the prompt."""
    if isinstance(value, list):
        for index, part in enumerate(value):
            check_parts(part, f"{where}[{index}]")
    for name, content in fields_of(value).items():
        if name in PART_FIELDS:
            check_parts(content, f"{where}.{name}")
        elif name not in OPAQUE and not _is_empty(content):
            advice = ", because a prompt has no place for it; write it into the content or leave it out"
            raise unsupported(f"{where}.{name}", advice)


def _is_empty(value: object) -> bool:
    # Clients repeat the fields of a reply, also the empty ones.
    return not value or (isinstance(value, Mapping) and all(map(_is_empty, value.values())))


def fields_of(value: object) -> Mapping[str, object]:
    """Return the fields of a JSON object; anything else has none."""
    return value if isinstance(value, Mapping) else {}


def call_text(call: ToolCall) -> str:
    """Write a function call whose arguments are JSON as text."""
    return f'{OPEN}{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}{CLOSE}'


def call_of(name: object, arguments: object) -> ToolCall:
    """Return a call whose arguments are canonical JSON text.

    Equal arguments get equal text, whether given as a value or as JSON text. Without a value or text they are empty.
    Invalid JSON becomes a JSON string.
    """
    try:
        value = _DECODER.decode(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
        written = json.dumps({} if value is None else value, ensure_ascii=False, sort_keys=True)
    except (ValueError, RecursionError):
        written = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name=str(name), arguments=written)


def _distinct(fields: list[tuple[str, object]]) -> dict[str, object]:
    if len(fields) != len(value := dict(fields)):
        raise ValueError("a field occurs twice, and only one of its values could be kept")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message. Equality ignores white space around an assistant's text, call ids, and key order in arguments."""

    role: Speaker
    content: str
    calls: tuple[ToolCall, ...] = ()
    """Function calls with JSON arguments."""
    call_ids: tuple[object, ...] = field(default=(), compare=False)
    """The ids of its calls, or the id of the call that it answers."""

    @property
    def turn(self) -> ChatRole:
        """The role in whose turn it is written."""
        return "user" if self.role == "tool" else self.role

    @property
    def text(self) -> str:
        """The message as it is written into a prompt."""
        if self.role == "tool":
            return f"<tool_response>\n{self.content}\n</tool_response>"
        return "\n".join(part for part in (self.content, *map(call_text, self.calls)) if part)


def plain_text(content: object, where: str) -> str:
    """Return the text of a string or of parts. `where` begins with the request's field.

    Raises RequestError for anything that is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if part.get("type") in TEXTS else None for part in map(fields_of, parts)]
    if not all(isinstance(text, str) for text in texts):
        param = where.partition("[")[0]
        raise RequestError(f"{where} holds something other than text, which this model cannot read", param=param)
    return "".join(map(str, texts))


def in_call_order(messages: Iterable[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Sort consecutive tool results into the order of their calls.

    Clients may send results in any order, and only their order tells a model which call each of them answers.
    """
    ordered: list[ChatMessage] = []
    open_calls: tuple[object, ...] = ()
    for is_result, group in groupby(messages, lambda message: message.role == "tool"):
        run = list(group)
        if not is_result:
            open_calls = run[-1].call_ids
        elif all(result.call_ids and result.call_ids[0] in open_calls for result in run):
            run.sort(key=lambda result, order=open_calls: order.index(result.call_ids[0]))  # type: ignore[misc]
        ordered += run
    return tuple(ordered)


def turns_of(messages: Sequence[ChatMessage], tools: Sequence[str] = ()) -> list[Message]:
    """Return the messages for a chat template.

    Consecutive tool results and messages of the user become one turn of the user. `tools`, the JSON of each function
    that may be called, are described in the system message.
    """
    turns: list[Message] = []
    for role, group in groupby(messages, lambda message: message.turn):
        contents = [message.text for message in group]
        turns += [Message(role=role, content=one) for one in (["\n".join(contents)] if role == "user" else contents)]
    if not tools:
        return turns
    form = f'{OPEN}{{"name": "...", "arguments": {{...}}}}{CLOSE}'
    described = "\n".join(("Functions that you can call:", *tools, "Call one by writing:", form))
    if turns and turns[0].role == "system":
        return [Message(role="system", content=f"{turns[0].content}\n\n{described}"), *turns[1:]]
    return [Message(role="system", content=described), *turns]


def openai_assistant(message: ChatMessage, call_ids: Iterable[str]) -> dict[str, object]:
    """Write an assistant's message in OpenAI's chat protocol, with these ids for its calls."""
    if not message.calls:
        return {"role": "assistant", "content": message.content}
    calls = [
        {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call_id, call in zip(call_ids, message.calls, strict=True)
    ]
    return {"role": "assistant", "content": message.content or None, "tool_calls": calls}


def read_calls(text: str, *, thinking: bool = False) -> ChatMessage | None:
    """Read a sampled text with function calls, or return None if the whole text is plain words.

    It is if it has no calls, or if one is malformed, or has arguments that are not an object that clients can read.
    What looks like a call inside of thoughts is none. Thoughts begin with their mark, or with the text if their end
    comes first or the prompt began them (`thinking`), and without an end they take the rest.
    """
    calls: list[ToolCall | None] = []
    words, start, place = "", 0, 0
    while mark := _MARKS.search(text, place):
        place = mark.end()
        if mark[0] in THOUGHTS:
            place = text.find(end := THOUGHTS[mark[0]], place) + len(end)
            if place < len(end):
                break
            thinking = False
        elif mark[0] in THOUGHTS.values():
            calls, words, start, thinking = [], "", 0, False
        elif found := _call_at(text, place):
            call, place = found
            calls.append(call)
            words, start = words + text[start : mark.start()], place
    read = [call for call in calls if call is not None]
    if thinking or not read or len(read) < len(calls):
        return None
    return ChatMessage(role="assistant", content=(words + text[start:]).strip(), calls=tuple(read))


def _call_at(text: str, place: int) -> tuple[ToolCall | None, int] | None:
    """Return the call whose JSON begins there, and its end; no call if it is malformed, and None if it has no end."""
    try:
        # The JSON value may itself contain the closing mark.
        value, end = _DECODER.raw_decode(text, place)
    except (ValueError, RecursionError):
        value, end = None, place
    if closing := _CLOSING.match(text, end):
        return _written_call(value), closing.end()
    malformed = _MALFORMED.match(text, place)
    return (None, malformed.end()) if malformed else None


def _written_call(value: object) -> ToolCall | None:
    """Return the call; none if it has other fields than its name and its arguments, which would be lost."""
    if not isinstance(value, dict) or not isinstance(name := value.pop("name", None), str):
        return None
    if len(value) > 1 or not value.keys() <= {*ARGUMENTS}:
        return None
    try:
        call = call_of(name, next(iter(value.values()), {}))
        arguments = json.loads(call.arguments)
        check_depth(arguments)
        # Python accepts infinite numbers and half surrogate pairs, which no client can read as JSON.
        json.dumps([call.name, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return call if call.arguments.startswith("{") else None
