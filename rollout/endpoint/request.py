"""A model request of any protocol: its checks, its functions and its grammar."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from rollout.endpoint.messages import CLOSE, OPEN, ChatMessage, RequestError, check_parts, fields_of, unsupported
from rollout.json_grammar import JsonGrammar, quoted

Body: TypeAlias = Mapping[str, object]
Function: TypeAlias = Mapping[str, object]
"""`name`, and optionally `description` and `parameters`."""

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
    max_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A checked request."""

    body: Body
    """The fields as they were sent, except those that are null."""
    messages: tuple[ChatMessage, ...]
    tools: tuple[str, ...] = ()
    """The functions that may be called, as JSON."""
    grammar: str | None = None
    """EBNF of the reply; None allows any text."""
    max_tokens: int
    seed: int | None = None
    stop: tuple[str, ...] = ()
    num_instructions: int = 0
    """Leading messages that later requests do not inherit when they name this reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Fields that requests of a protocol may have."""

    known: tuple[str, ...]
    """Fields that the protocol's own code reads, or that have no effect on sampling."""
    fixed: Body = field(default_factory=dict)
    """Fields with their only allowed value."""
    neutral: Body
    """Sampling settings with the value that changes nothing."""


def read_fields(body: object, rules: Rules, fields: Fields) -> Body:
    """Return the fields of a request that are not null.

    Raises RequestError for an unknown field or model, for parts that no prompt has a place for, and for sampling
    settings that differ from the recipe's.
    """
    given = {name: value for name, value in fields_of(body).items() if value is not None}
    if given.get("model") != rules.model:
        raise RequestError(
            f"the model {given.get('model')!r} does not exist here; agent.model names the policy, '{rules.model}'",
            status=404,
            code="model_not_found",
            param="model",
        )
    sampling: Body = {"temperature": rules.temperature, **fields.neutral}
    for name, value in given.items():
        if name in fields.fixed and value != fields.fixed[name]:
            only = json.dumps(fields.fixed[name])
            raise RequestError(f"{name} can only be {only}", code="unsupported_value", param=name)
        if name in sampling and value != sampling[name] and not rules.override:
            raise RequestError(
                f"{name} = {value!r} differs from the recipe's {sampling[name]!r}, with which all training data is "
                "sampled; leave it out, or set agent.sampling = 'override' to ignore it",
                code="unsupported_value",
                param=name,
            )
        if name not in (*fields.known, *fields.fixed, *sampling):
            raise unsupported(name)
    for name in ("messages", "input", "system", "tools"):
        check_parts(given.get(name), name)
    return given


def build_request(
    given: Body,
    rules: Rules,
    *,
    messages: Sequence[ChatMessage],
    form: object,
    param: str,
    limit: str,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    num_instructions: int = 0,
) -> ModelRequest:
    """Return the request with the `form` that `param` asks for and the bound in `limit`. Raises RequestError."""
    tools, grammar = _tools_and_grammar(given, _form_schemas(form, param), rules, param)
    return ModelRequest(
        body=given,
        messages=tuple(messages),
        tools=tools,
        grammar=grammar,
        max_tokens=min(whole_number(given, limit, 1) or rules.max_tokens, rules.max_tokens),
        seed=seed,
        stop=stop,
        num_instructions=num_instructions,
    )


def whole_number(given: Body, name: str, least: int | None = None) -> int | None:
    """Return an integer field, or None if it is missing. Raises RequestError."""
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        bound = "" if least is None else f" above {least - 1}"
        raise RequestError(f"{name} must be a whole number{bound}", param=name)
    return value


def texts(given: Body, name: str) -> tuple[str, ...]:
    """Return a field with one or several texts. Raises RequestError."""
    value = given.get(name, [])
    found = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) and text for text in found):
        raise RequestError(f"{name} must be a text or a list of texts", param=name)
    return tuple(map(str, found))


def _functions(given: Body) -> dict[str, Function]:
    functions: dict[str, Function] = {}
    tools = given.get("tools", [])
    for index, tool in enumerate(map(fields_of, tools if isinstance(tools, list) else [tools])):
        where = f"tools[{index}]"
        # Anthropic's custom tools are functions; OpenAI's take any text, and have no schema.
        if tool.get("type", "function") != "function" and not (tool["type"] == "custom" and "input_schema" in tool):
            raise unsupported(f"{where}.type = {tool['type']}")
        # Only Chat Completions nests a function in its tool.
        fields = fields_of(tool.get("function", tool))
        name, schema = fields.get("name"), fields.get("parameters", fields.get("input_schema"))
        if not isinstance(name, str):
            raise RequestError(f"{where} must be a function with a name", param="tools")
        function = {"name": name, "description": fields.get("description"), "parameters": schema}
        functions[name] = {part: value for part, value in function.items() if value is not None}
    return functions


def _choice(given: Body) -> tuple[str, object, str | None]:
    """Return "auto", "none", "required" or "named", the named function, and the field that limits calls to one."""
    choice = given.get("tool_choice", "auto")
    fields = fields_of(choice)
    single = None
    if given.get("parallel_tool_calls") is False:
        single = "parallel_tool_calls"
    elif fields.get("disable_parallel_tool_use") is True:
        single = "tool_choice"
    match fields.get("type", choice):
        case "auto" | "none" | "required" as kind:
            return kind, None, single
        case "any":
            return "required", None, single
        case "function" | "tool":
            return "named", fields_of(fields.get("function", fields)).get("name"), single
    raise RequestError(f"tool_choice = {choice!r} is neither auto, none, required nor a function", param="tool_choice")


def _tools_and_grammar(
    given: Body, schemas: list[object], rules: Rules, param: str
) -> tuple[tuple[str, ...], str | None]:
    """Return the JSON of the functions that may be called, and the grammar of the reply; None allows any text.

    The grammar forces calls if they are required. Otherwise it admits the forms of `schemas`, and calls.
    """
    kind, name, single = _choice(given)
    functions = _functions(given) if kind != "none" else {}
    if single and kind == "auto" and functions and not rules.override:
        # Only a grammar limits the number of calls, and an optional call has none.
        raise RequestError(
            "the number of calls cannot be limited if no call is required: the model writes free text; leave this out, "
            "require a call by tool_choice, or set agent.sampling = 'override' to ignore it",
            code="unsupported_value",
            param=single,
        )
    called = [function for known, function in functions.items() if kind != "named" or known == name]
    if kind in ("named", "required") and not called:
        raise RequestError(f"tool_choice requires a call, but tools hold no {name or 'function'}", param="tool_choice")
    tools = tuple(json.dumps(function, ensure_ascii=False) for function in functions.values())
    if kind in ("named", "required"):
        schemas = []
    elif not schemas:
        return tools, None
    most = 1 if single or kind == "named" else MAX_PARALLEL_CALLS
    return tools, _grammar(json.dumps(schemas), json.dumps(called), most, param)


def _form_schemas(form: object, param: str) -> list[object]:
    """Return the schema of a requested form, or none for any text. Raises RequestError that names `param`."""
    fields = fields_of(form if form is not None else {"type": "text"})
    match {**fields, **fields_of(fields.get("json_schema")), "type": fields.get("type")}:
        case {"type": "text"}:
            return []
        case {"type": "json_object"}:
            return [{"type": "object"}]
        case {"type": "json_schema", "schema": schema}:
            return [schema]
    raise RequestError(f"{param} must be text, json_object or json_schema with a schema", param=param.partition(".")[0])


@lru_cache(maxsize=256)
def _grammar(schemas: str, functions: str, most: int, param: str) -> str:
    """Return the EBNF of forms or calls, in JSON, without optional white space. Raises RequestError."""
    grammar, where, calls = JsonGrammar(), param, []
    try:
        choices = [grammar.value(schema) for schema in json.loads(schemas)]
        for function in json.loads(functions):
            where = f"tools, the parameters of {function['name']}"
            opening = quoted(f'{OPEN}{{"name": {json.dumps(function["name"])}, "arguments": ')
            arguments = grammar.arguments(function.get("parameters") or {"properties": {}})
            calls.append(f"{opening} {arguments} {quoted(f'}}{CLOSE}')}")
    except ValueError as error:
        raise RequestError(
            f"{where}: no grammar enforces this schema: {error}; leave it out and check the reply yourself",
            code="unsupported_schema",
            param=where.partition(",")[0].partition(".")[0],
        ) from error
    if calls:
        call = grammar.new_rule(" | ".join(calls))
        choices.append(rf'{call} ("\n" {call}){{0,{most - 1}}}')
    return grammar.text(" | ".join(choices))
