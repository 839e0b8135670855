"""What a request asks, whichever protocol it came in, or why it is refused; and the form of the events of a reply."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeAlias

from rollout.endpoint.messages import CLOSE, OPEN, Refused, Said, fields_of, unsupported

if TYPE_CHECKING:
    from xgrammar import Grammar

Function: TypeAlias = Mapping[str, object]
"""`name`, and where it has them `description` and `parameters`."""

MAX_PARALLEL_CALLS = 4
"""Of a turn that must call functions; one that may is free text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an attempt may ask. `temperature` is the recipe's in training, the one that a request may name; `override`
    samples as the recipe says whatever a request names. `max_tokens` is the limit of one reply."""

    model: str
    temperature: float
    override: bool
    max_tokens: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`tools` are the functions that may be called, as JSON; `grammar` is EBNF source; `fingerprint` is equal for equal
    requests of one protocol. The first `num_instructions` messages are the request's own, which a later one that names
    its reply does not go on with. `echo`: fields that the reply repeats."""

    fingerprint: str
    messages: tuple[Said, ...]
    tools: tuple[str, ...] = ()
    grammar: str | None = None
    max_tokens: int
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool
    with_usage: bool = False
    num_instructions: int = 0
    echo: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What the requests of a protocol may hold: `read` are looked at elsewhere; `idle` have no effect on what is
    sampled; `fixed` can only have these values; `neutral` are the values of what else may be said of the sampling that
    change nothing."""

    read: tuple[str, ...]
    idle: tuple[str, ...]
    fixed: Mapping[str, object] = field(default_factory=dict)
    neutral: Mapping[str, object]


def read_fields(body: object, rules: Rules, fields: Fields) -> dict[str, object]:
    """The fields that are not null: all known, for our model, and with nothing that would sample otherwise than the
    recipe, where it is not to override that. Raises Refused."""
    if not isinstance(body, Mapping):
        raise Refused("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    if given.get("model") != rules.model:
        raise Refused(
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
            raise Refused(f"{name} can only be {json.dumps(value)}", code="unsupported_value", param=name)
    for name, value in {"temperature": rules.temperature, **fields.neutral}.items():
        if name in given and given[name] != value and not rules.override:
            raise Refused(
                f"{name} = {given[name]!r} is not what the recipe samples with ({value!r}), and what is trained must "
                "be; leave it out, or set agent.sampling = 'override' to sample as the recipe says all the same",
                code="unsupported_value",
                param=name,
            )
    return given


def fingerprint(protocol: str, given: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps([protocol, given], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a request says of calls: there may be some ("auto"), there are none, one is required, or one of the function
    `name` is. `single` is the field that keeps them to one at most, None where there is none."""

    kind: Literal["auto", "none", "required", "named"]
    name: object = None
    single: str | None = None


PartsOf: TypeAlias = Callable[[Mapping[str, object], str], tuple[object, object, object]]
"""Name, description and parameters of a tool; it is told the tool's place."""


def _functions_of(given: Mapping[str, object], parts_of: PartsOf) -> dict[str, Function]:
    """The functions of `tools` by their names, in one form, so that the same one reads the same in every protocol.
    Raises Refused."""
    found: dict[str, Function] = {}
    tools = given.get("tools", [])
    for index, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        where = f"tools[{index}]"
        name, description, parameters = parts_of(fields_of(tool), where)
        if not isinstance(name, str):
            raise Refused(f"{where} must be a function with a name", param="tools")
        fields = {"name": name, "description": description, "parameters": parameters}
        found[name] = {part: value for part, value in fields.items() if value is not None}
    return found


def tools_and_grammar(
    given: Mapping[str, object],
    rules: Rules,
    *,
    parts_of: PartsOf,
    choice_of: Callable[[Mapping[str, object]], Choice],
    form_of: Callable[[Mapping[str, object]], str | None],
) -> tuple[tuple[str, ...], str | None]:
    """The functions that may be called, as JSON, and the grammar of the reply: of calls where they are required, else
    of words in the grammar that `form_of` gives or calls. None where any words may be said. Raises Refused."""
    functions, choice = _functions_of(given, parts_of), choice_of(given)
    if choice.kind == "none":
        functions = {}
    if choice.single and choice.kind == "auto" and functions and not rules.override:
        # Free text may call several functions: only a call that is required can be kept to one.
        raise Refused(
            "where no call is required the model writes free text, which may call several functions; leave this out, "
            "require a call by tool_choice, or set agent.sampling = 'override' to let it be",
            code="unsupported_value",
            param=choice.single,
        )
    tools = tuple(json.dumps(function, ensure_ascii=False) for function in functions.values())
    if choice.kind == "named":
        if not isinstance(choice.name, str) or choice.name not in functions:
            raise Refused(f"tool_choice names {choice.name!r}, which is none of tools", param="tool_choice")
        return tools, calls_grammar([functions[choice.name]], 1)
    most = 1 if choice.single else MAX_PARALLEL_CALLS
    if choice.kind == "required":
        return tools, calls_grammar([*functions.values()], most)
    words = form_of(given)
    if words is None or not functions:
        return tools, words
    return tools, _either(words, calls_grammar([*functions.values()], most))


def whole_number(given: Mapping[str, object], name: str, least: int | None = None) -> int | None:
    """None where it is not given. Raises Refused."""
    value = given.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise Refused(f"{name} must be a whole number", param=name)
    if value is not None and least is not None and value < least:
        raise Refused(f"{name} must be a whole number above {least - 1}", param=name)
    return value


def texts(given: Mapping[str, object], name: str) -> tuple[str, ...]:
    """One or several. Raises Refused."""
    value = given.get(name, ())
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else (None,)
    if not all(isinstance(text, str) and text for text in found):
        raise Refused(f"{name} must be a text or a list of texts", param=name)
    return tuple(map(str, found))


def calls_grammar(functions: Sequence[Function], most: int = MAX_PARALLEL_CALLS) -> str:
    """Of one to `most` calls of these functions. Raises Refused."""
    if not functions:
        raise Refused("a tool_choice that requires a call needs tools", param="tool_choice")
    return _compiled("calls", json.dumps([*functions]), most)


def object_grammar() -> str:
    """Of any JSON object."""
    return _compiled("object", "", 1)


def schema_grammar(schema: object) -> str:
    """Raises Refused."""
    return _compiled("schema", json.dumps(schema), 1)


@lru_cache(maxsize=256)
def _either(one: str, other: str) -> str:
    from xgrammar import Grammar

    return _source(Grammar.union(Grammar.from_ebnf(one), Grammar.from_ebnf(other)))


_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)")


def _source(grammar: "Grammar") -> str:
    r"""EBNF. xgrammar writes `é` as `\xe9` and reads `\xe9e` as one letter; four digits after `\u` have an end."""
    return _ESCAPE.sub(lambda escape: rf"\u00{escape[1]}" if escape[1] else escape[0], str(grammar))


@lru_cache(maxsize=256)
def _compiled(form: str, source: str, most: int) -> str:
    """EBNF, without free white space. Raises Refused for a schema that no grammar can be made of."""
    from xgrammar import Grammar

    try:
        match form:
            case "object":
                return _source(Grammar.from_json_schema({"type": "object"}, any_whitespace=False, strict_mode=False))
            case "schema":
                return _source(Grammar.from_json_schema(source, any_whitespace=False))
        call = _source(Grammar.union(*(_call_grammar(function) for function in json.loads(source))))
        # Nothing refers to the root of a union, so that it can be given another name.
        renamed = re.sub(r"^root ::=", "one_call ::=", call, flags=re.MULTILINE)
        return rf'root ::= one_call ("\n" one_call){{0,{most - 1}}}' + f"\n{renamed}"
    except Exception as error:
        # xgrammar has no error class of its own for a schema that it cannot follow.
        raise Refused(f"no grammar can be made of this schema: {' '.join(str(error).split())[:300]}") from error


def _call_grammar(function: Function) -> "Grammar":
    from xgrammar import Grammar

    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    opening = json.dumps(f'{OPEN}{{"name": {json.dumps(function["name"])}, "arguments": ')
    closing = json.dumps(f"}}{CLOSE}")
    arguments = Grammar.from_json_schema(json.dumps(parameters), any_whitespace=False)
    return Grammar.concat(Grammar.from_ebnf(f"root ::= {opening}"), arguments, Grammar.from_ebnf(f"root ::= {closing}"))


def event(value: Mapping[str, object]) -> str:
    """A server-sent one."""
    return f"data: {json.dumps(value)}\n\n"


def named_event(value: Mapping[str, object]) -> str:
    """One that bears the name of its type."""
    return f"event: {value['type']}\n{event(value)}"
