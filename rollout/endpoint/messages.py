"""What is said in a conversation, in one form whoever wrote it, and how calls of functions stand in its text.

A call is written as a JSON object between `<tool_call>` and `</tool_call>`, a result between `<tool_response>` and
`</tool_response>` in the user's turn: the form that Hermes and Qwen models are trained on, and any other can learn.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Literal, NotRequired, TypedDict

from configs.errors import check_depth
from envs.types import ToolCall
from rollout.types import Message

SaidRole = Literal["system", "user", "assistant", "tool"]
OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"
_OPENING = re.compile(r"<tool_call>\s*(?=\{)")
_CLOSING = re.compile(r"\s*</tool_call>")
_MALFORMED = re.compile(r"\{.*?\}\s*</tool_call>", re.DOTALL)


class Refused(Exception):
    """A request that is not answered; `code` and `param` as OpenAI's clients read them."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def unsupported(name: str, advice: str = "") -> Refused:
    return Refused(f"'{name}' is not supported{advice}", code="unsupported_parameter", param=name)


_ADVICE = ", since no prompt has a place for it; say it in the content or leave it out"


def check_fields(value: Mapping[str, object], where: str, known: Collection[str]) -> None:
    """Whether a message, or a part of one, holds nothing that its prompt would be without. Raises Refused."""
    for name, given in value.items():
        if name not in known and not _is_empty(given):
            raise unsupported(f"{where}.{name}", _ADVICE)


def _is_empty(value: object) -> bool:
    """Clients repeat the fields of a reply, also those with nothing in them."""
    return not value or (isinstance(value, Mapping) and all(map(_is_empty, value.values())))


def call_text(call: ToolCall) -> str:
    """A call of a function whose arguments are JSON, as it stands in a text."""
    return f'{OPEN}{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}{CLOSE}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One message; the arguments of its calls are JSON. Two that are equal mean the same: white space around an
    assistant's words, the ids of calls and the order of keys in their arguments do not count. `call_ids` are those of
    its calls, or of the call that it answers."""

    role: SaidRole
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_ids: tuple[object, ...] = field(default=(), compare=False)

    @property
    def text(self) -> str:
        """As it stands in a prompt."""
        if self.role == "tool":
            return f"<tool_response>\n{self.content}\n</tool_response>"
        return "\n".join(part for part in (self.content, *map(call_text, self.calls)) if part)


def fields_of(value: object) -> Mapping[str, object]:
    """Of an object of JSON; anything else has none."""
    return value if isinstance(value, Mapping) else {}


_PART = ("type", "text", "id", "index", "logprobs", "parsed", "cache_control", "prompt_cache_breakpoint")
"""Fields of a text that is a part of a message: what it says, and what is no news to a model."""


def plain_text(content: object, where: str, kinds: Collection[str] = ("text",)) -> str:
    """Of a text, or of parts of these kinds. Raises Refused; `where` begins with the request's field."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") in kinds else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        field_name = where.partition("[")[0]
        raise Refused(f"{where} holds something other than text, which this model cannot read", param=field_name)
    for index, part in enumerate(parts):
        check_fields(part, f"{where}[{index}]" if parts is content else where, _PART)
    return "".join(map(str, texts))


def in_call_order(messages: Iterable[Said]) -> tuple[Said, ...]:
    """With results that stand side by side in the order of the calls that they answer. A client may send them in
    another one, as they came in, and a prompt says by nothing but their order which is whose."""
    ordered: list[Said] = []
    open_calls: tuple[object, ...] = ()
    for is_result, group in groupby(messages, lambda one: one.role == "tool"):
        run = list(group)
        if not is_result:
            open_calls = run[-1].call_ids
        elif all(one.call_ids and one.call_ids[0] in open_calls for one in run):
            run.sort(key=partial(_place, open_calls))
        ordered += run
    return tuple(ordered)


def _place(open_calls: tuple[object, ...], result: Said) -> int:
    return open_calls.index(result.call_ids[0])


def call_of(name: object, arguments: object) -> ToolCall:
    """`arguments` is a value, or JSON text. The same have the same text; what is no JSON that can be read stays a JSON
    string."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        written = json.dumps(value, ensure_ascii=False, sort_keys=True)
    except (ValueError, RecursionError):
        written = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name=str(name), arguments=written)


def turns_of(messages: Sequence[Said], tools: Sequence[str] = ()) -> list[Message]:
    """As a chat template takes them: results of tools are the user's words, several in a row one message; the functions
    that may be called, each given as JSON, stand in the system's words."""
    turns: list[Message] = []
    for is_result, group in groupby(messages, lambda one: one.role == "tool"):
        if is_result:
            turns.append(Message(role="user", content="\n".join(one.text for one in group)))
        else:
            turns += [Message(role=one.role, content=one.text) for one in group if one.role != "tool"]
    if not tools:
        return turns
    form = f'{OPEN}{{"name": "...", "arguments": {{...}}}}{CLOSE}'
    described = "\n".join(("Functions that you can call:", *tools, "Call one by writing:", form))
    if turns and turns[0].role == "system":
        return [Message(role="system", content=f"{turns[0].content}\n\n{described}"), *turns[1:]]
    return [Message(role="system", content=described), *turns]


class AssistantMessage(TypedDict):
    """Of OpenAI's chat protocol."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: NotRequired[list[dict[str, object]]]


def openai_assistant(said: Said, call_ids: Sequence[str]) -> AssistantMessage:
    """With an id for each of its calls."""
    message: AssistantMessage = {"role": "assistant", "content": said.content or (None if said.calls else "")}
    if said.calls:
        message["tool_calls"] = [
            {"id": own_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for own_id, call in zip(call_ids, said.calls, strict=True)
        ]
    return message


def read_reply(text: str) -> Said:
    """A sampled text as a message. One in which a call is malformed, or its arguments are no object as clients can read
    it, calls nothing and is read as plain words."""
    plain = Said(role="assistant", content=text.strip())
    calls: list[ToolCall] = []
    words, place = "", 0
    while opening := _OPENING.search(text, place):
        value, end = _json_at(text, opening.end())
        closing = _CLOSING.match(text, end)
        if closing is None:
            if _MALFORMED.match(text, opening.end()):
                return plain
            words, place = words + text[place : opening.end()], opening.end()
            continue
        call = _written_call(value)
        if call is None:
            return plain
        calls.append(call)
        words, place = words + text[place : opening.start()], closing.end()
    return Said(role="assistant", content=(words + text[place:]).strip(), calls=tuple(calls)) if calls else plain


def _json_at(text: str, start: int) -> tuple[object, int]:
    """The value that begins there, which may hold what ends a call in a text, and where it ends. Where there is none,
    it ends at once."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start


def _written_call(value: object) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    try:
        call = call_of(value["name"], value.get("arguments", {}))
        arguments = json.loads(call.arguments)
        check_depth(arguments)
        # Python reads numbers beyond all bounds, and half a surrogate pair, which no client's JSON can hold.
        json.dumps([call.name, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return call if call.arguments.startswith("{") else None
