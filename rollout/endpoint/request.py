"""A model request of any protocol: its checks, its functions and its grammar."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeAlias

from rollout.endpoint.messages import CLOSE, OPEN, ChatMessage, RequestError, fields_of, unsupported

if TYPE_CHECKING:
    from xgrammar import Grammar

Function: TypeAlias = Mapping[str, object]
"""`name`, and optionally `description` and `parameters`."""
ReadTool: TypeAlias = Callable[[Mapping[str, object], str], tuple[object, object, object]]
"""Returns name, description and parameters of a tool; the second argument is its place in the request."""

MAX_PARALLEL_CALLS = 4
"""Calls in a turn that is forced to call functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Limits of the requests of an attempt."""

    model: str
    temperature: float
    """The recipe's temperature; requests may name no other one."""
    override: bool
    """Ignore other sampling settings in requests instead of rejecting them."""
    max_tokens: int
    """Limit of one reply."""
    max_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A checked request."""

    fingerprint: str
    """Equal for equal requests of one protocol."""
    messages: tuple[ChatMessage, ...]
    tools: tuple[str, ...] = ()
    """The functions that may be called, as JSON."""
    grammar: str | None = None
    """EBNF of the reply; None allows any text."""
    max_tokens: int
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool
    with_usage: bool = False
    num_instructions: int = 0
    """Leading messages that later requests do not inherit when they name this reply."""
    echo: Mapping[str, object] = field(default_factory=dict)
    """Fields that the reply repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Fields that requests of a protocol may have."""

    read: tuple[str, ...]
    """Fields that the protocol's own code reads."""
    idle: tuple[str, ...]
    """Fields without effect on sampling."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fields with their only allowed value."""
    neutral: Mapping[str, object]
    """Sampling settings with the value that changes nothing."""


def read_fields(body: object, rules: Rules, fields: Fields) -> dict[str, object]:
    """Return the fields of a request that are not null.

    Raises RequestError for an unknown field or model, and for sampling settings that differ from the recipe's unless
    the rules override them.
    """
    if not isinstance(body, Mapping):
        raise RequestError("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    if given.get("model") != rules.model:
        raise RequestError(
            f"the model {given.get('model')!r} does not exist here; agent.model names the policy, '{rules.model}'",
            status=404,
            code="model_not_found",
            param="model",
        )
    for name in given:
        if name not in (*fields.read, *fields.idle, *fields.fixed, *fields.neutral):
            raise unsupported(name)
    for name, value in fields.fixed.items():
        if given.get(name, value) != value:
            raise RequestError(f"{name} can only be {json.dumps(value)}", code="unsupported_value", param=name)
    for name, value in {"temperature": rules.temperature, **fields.neutral}.items():
        if name in given and given[name] != value and not rules.override:
            raise RequestError(
                f"{name} = {given[name]!r} differs from the recipe's {value!r}, with which all training data is "
                "sampled; leave it out, or set agent.sampling = 'override' to ignore it",
                code="unsupported_value",
                param=name,
            )
    return given


def fingerprint(protocol: str, given: Mapping[str, object]) -> str:
    """Return a hash of a request."""
    return hashlib.sha256(json.dumps([protocol, given], sort_keys=True).encode()).hexdigest()


def whole_number(given: Mapping[str, object], name: str, least: int | None = None) -> int | None:
    """Return an integer field, or None if it is missing. Raises RequestError."""
    value = given.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise RequestError(f"{name} must be a whole number", param=name)
    if value is not None and least is not None and value < least:
        raise RequestError(f"{name} must be a whole number above {least - 1}", param=name)
    return value


def texts(given: Mapping[str, object], name: str) -> tuple[str, ...]:
    """Return a field with one or several texts. Raises RequestError."""
    value = given.get(name, ())
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else (None,)
    if not all(isinstance(text, str) and text for text in found):
        raise RequestError(f"{name} must be a text or a list of texts", param=name)
    return tuple(map(str, found))


def functions_of(given: Mapping[str, object], read_tool: ReadTool) -> dict[str, Function]:
    """Return the functions of `tools` by name, in one form for all protocols. Raises RequestError."""
    functions: dict[str, Function] = {}
    tools = given.get("tools", [])
    for index, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        where = f"tools[{index}]"
        name, description, parameters = read_tool(fields_of(tool), where)
        if not isinstance(name, str):
            raise RequestError(f"{where} must be a function with a name", param="tools")
        fields = {"name": name, "description": description, "parameters": parameters}
        functions[name] = {part: value for part, value in fields.items() if value is not None}
    return functions


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The calls that a request allows or requires."""

    kind: Literal["auto", "none", "required", "named"]
    name: object = None
    """The function to call, for kind "named"."""
    single: str | None = None
    """The request's field that allows one call at most, if it has one."""


def tools_and_grammar(
    functions: Mapping[str, Function], choice: Choice, words: str | None, rules: Rules
) -> tuple[tuple[str, ...], str | None]:
    """Return the JSON of the functions that may be called, and the grammar of the reply.

    The grammar forces calls if they are required. Otherwise it is `words`, the grammar of text, or calls; None allows
    any text. Raises RequestError.
    """
    if choice.kind == "none":
        functions = {}
    if choice.single and choice.kind == "auto" and functions and not rules.override:
        # Only a grammar limits the number of calls, and an optional call has none.
        raise RequestError(
            "the number of calls cannot be limited if no call is required: the model writes free text; leave this out, "
            "require a call by tool_choice, or set agent.sampling = 'override' to ignore it",
            code="unsupported_value",
            param=choice.single,
        )
    tools = tuple(json.dumps(function, ensure_ascii=False) for function in functions.values())
    if choice.kind == "named":
        if not isinstance(choice.name, str) or choice.name not in functions:
            raise RequestError(f"tool_choice names {choice.name!r}, which is not in tools", param="tool_choice")
        return tools, calls_grammar([functions[choice.name]], 1)
    most = 1 if choice.single else MAX_PARALLEL_CALLS
    if choice.kind == "required":
        return tools, calls_grammar([*functions.values()], most)
    if words is None or not functions:
        return tools, words
    return tools, _either(words, calls_grammar([*functions.values()], most))


def calls_grammar(functions: Sequence[Function], most: int = MAX_PARALLEL_CALLS) -> str:
    """Return the grammar of one to `most` calls of these functions. Raises RequestError."""
    if not functions:
        raise RequestError("a tool_choice that requires a call needs tools", param="tool_choice")
    return _compiled("calls", json.dumps([*functions]), most)


def form_grammar(form: object, param: str) -> str | None:
    """Return the grammar of a requested form, or None for any text. Raises RequestError that names `param`."""
    match form:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return _compiled("object", "", 1)
        case {"type": "json_schema", "schema": schema}:
            return _compiled("schema", json.dumps(schema), 1)
    raise RequestError(f"{param} must be text, json_object or json_schema with a schema", param=param.partition(".")[0])


def word_choice(given: Mapping[str, object]) -> Choice:
    """Return the choice of an OpenAI request that names no function. Raises RequestError."""
    single = "parallel_tool_calls" if given.get("parallel_tool_calls") is False else None
    match given.get("tool_choice", "auto"):
        case "auto" | "none" | "required" as kind:
            return Choice(kind=kind, single=single)
        case choice:
            raise RequestError(
                f"tool_choice = {choice!r} must be auto, none, required or a function", param="tool_choice"
            )


@lru_cache(maxsize=256)
def _either(one: str, other: str) -> str:
    from xgrammar import Grammar

    return _source(Grammar.union(Grammar.from_ebnf(one), Grammar.from_ebnf(other)))


_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)")


def _source(grammar: "Grammar") -> str:
    r"""Return the EBNF. xgrammar writes `é` as `\xe9` but reads `\xe9e` as one letter; `\u00e9` has a fixed length."""
    return _ESCAPE.sub(lambda escape: rf"\u00{escape[1]}" if escape[1] else escape[0], str(grammar))


@lru_cache(maxsize=256)
def _compiled(form: str, source: str, most: int) -> str:
    """Return EBNF without optional white space. Raises RequestError for an unsupported schema."""
    from xgrammar import Grammar

    try:
        match form:
            case "object":
                return _source(Grammar.from_json_schema({"type": "object"}, any_whitespace=False, strict_mode=False))
            case "schema":
                return _source(Grammar.from_json_schema(source, any_whitespace=False))
        calls = []
        for function in json.loads(source):
            opening = json.dumps(f'{OPEN}{{"name": {json.dumps(function["name"])}, "arguments": ')
            closing = json.dumps(f"}}{CLOSE}")
            parameters = function.get("parameters") or {"type": "object", "properties": {}}
            arguments = Grammar.from_json_schema(json.dumps(parameters), any_whitespace=False)
            parts = (Grammar.from_ebnf(f"root ::= {opening}"), arguments, Grammar.from_ebnf(f"root ::= {closing}"))
            calls.append(Grammar.concat(*parts))
        # No rule refers to the root of a union, so it can be renamed.
        call = re.sub(r"^root ::=", "one_call ::=", _source(Grammar.union(*calls)), flags=re.MULTILINE)
        return rf'root ::= one_call ("\n" one_call){{0,{most - 1}}}' + f"\n{call}"
    except Exception as error:
        # xgrammar has no error class for unsupported schemas.
        raise RequestError(f"no grammar can be made of this schema: {' '.join(str(error).split())[:300]}") from error


def event(value: Mapping[str, object]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


def named_event(value: Mapping[str, object]) -> str:
    """Return a server-sent event with the name of its type."""
    return f"event: {value['type']}\n{event(value)}"
