"""A request of OpenAI's chat protocol: what it asks, or why it is refused."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rollout.endpoint.messages import CLOSE, OPEN, MessageError, Said, said_of

NEUTRAL: Mapping[str, Any] = {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}
"""What else a request may say of the sampling: these values, which change nothing."""

OTHER = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields that have no effect on what is sampled."""

READ = (
    "model",
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "stream",
    "stream_options",
    "seed",
    "temperature",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "n",
)
MAX_PARALLEL_CALLS = 4
"""Of a turn that must call functions; one that may is free text."""


class Refused(Exception):
    """A request that is not answered; `code` and `param` as OpenAI's clients read them."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


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
    requests."""

    fingerprint: str
    messages: tuple[Said, ...]
    tools: tuple[str, ...]
    grammar: str | None
    max_tokens: int
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    with_usage: bool


def read_request(body: Any, rules: Rules) -> Asked:
    """Raises Refused."""
    if not isinstance(body, Mapping):
        raise Refused("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    _check_model(given.get("model"), rules)
    _check_sampling(given, rules)
    tools = _tools(given)
    try:
        messages = said_of(given.get("messages"))
    except MessageError as error:
        raise Refused(str(error), param="messages") from None
    options = given.get("stream_options", {})
    return Asked(
        fingerprint=hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest(),
        messages=messages,
        tools=tuple(json.dumps(tool, ensure_ascii=False) for tool in tools.values()),
        grammar=_grammar(given, tools),
        max_tokens=min(_max_tokens(given), rules.max_tokens),
        seed=_seed(given.get("seed")),
        stop=_stop(given.get("stop", ())),
        stream=given.get("stream") is True,
        with_usage=isinstance(options, Mapping) and options.get("include_usage") is True,
    )


def _check_model(model: Any, rules: Rules) -> None:
    if model != rules.model:
        raise Refused(
            f"the model {model!r} does not exist here; agent.model names the policy, '{rules.model}'",
            status=404,
            code="model_not_found",
            param="model",
        )


def _check_sampling(given: Mapping[str, Any], rules: Rules) -> None:
    unknown = [name for name in given if name not in (*READ, *NEUTRAL, *OTHER)]
    if unknown:
        raise Refused(f"'{unknown[0]}' is not supported", code="unsupported_parameter", param=unknown[0])
    if given.get("n", 1) != 1:
        raise Refused("one reply a request: ask n times", code="unsupported_value", param="n")
    if rules.override:
        return
    for name, neutral in {"temperature": rules.temperature, **NEUTRAL}.items():
        if name in given and given[name] != neutral:
            raise Refused(
                f"{name} = {given[name]!r} is not what the recipe samples with ({neutral!r}), and what is trained must "
                "be; leave it out, or set agent.sampling = 'override' to sample as the recipe says all the same",
                code="unsupported_value",
                param=name,
            )


def _tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """The functions by their names."""
    found: dict[str, Any] = {}
    tools = given.get("tools", [])
    for index, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Refused(f"tools[{index}] must be a function with a name", param="tools")
        found[function["name"]] = function
    return found if given.get("tool_choice", "auto") != "none" else {}


def _max_tokens(given: Mapping[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        value = given.get(name)
        if value is not None:
            if not isinstance(value, int) or value < 1:
                raise Refused(f"{name} must be a whole number above 0", param=name)
            return value
    return 2**31


def _seed(seed: Any) -> int | None:
    if seed is not None and not isinstance(seed, int):
        raise Refused("seed must be a whole number", param="seed")
    return seed


def _stop(stop: Any) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, (list, tuple)) else (None,)
    if not all(isinstance(text, str) and text for text in texts):
        raise Refused("stop must be a text or a list of texts", param="stop")
    return tuple(map(str, texts))


def _grammar(given: Mapping[str, Any], tools: Mapping[str, Any]) -> str | None:
    """Of the calls where functions must be called, else of `response_format`. Raises Refused."""
    choice = given.get("tool_choice", "auto")
    wanted = given.get("response_format", {"type": "text"})
    if isinstance(choice, Mapping):
        name = choice.get("function", {}).get("name")
        if name not in tools:
            raise Refused(f"tool_choice names {name!r}, which is none of tools", param="tool_choice")
        return _compiled("calls", json.dumps([tools[name]]), 1)
    if choice == "required":
        if not tools:
            raise Refused("tool_choice = 'required' needs tools", param="tool_choice")
        most = 1 if given.get("parallel_tool_calls") is False else MAX_PARALLEL_CALLS
        return _compiled("calls", json.dumps([*tools.values()]), most)
    if choice not in ("auto", "none"):
        raise Refused(f"tool_choice = {choice!r} is none of auto, none, required", param="tool_choice")
    match wanted:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return _compiled("object", "", 1)
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return _compiled("schema", json.dumps(schema), 1)
    raise Refused("response_format must be text, json_object or json_schema with a schema", param="response_format")


@lru_cache(maxsize=256)
def _compiled(form: str, source: str, most: int) -> str:
    """EBNF, without free white space. Raises Refused for a schema that no grammar can be made of."""
    from xgrammar import Grammar

    try:
        match form:
            case "object":
                return str(Grammar.from_json_schema({"type": "object"}, any_whitespace=False, strict_mode=False))
            case "schema":
                return str(Grammar.from_json_schema(source, any_whitespace=False))
        call = str(Grammar.union(*(_call_grammar(function) for function in json.loads(source))))
        # Nothing refers to the root of a union, so that it can be given another name.
        renamed = re.sub(r"^root ::=", "one_call ::=", call, flags=re.MULTILINE)
        return rf'root ::= one_call ("\n" one_call){{0,{most - 1}}}' + f"\n{renamed}"
    except Exception as error:
        # xgrammar has no error class of its own for a schema that it cannot follow.
        raise Refused(f"no grammar can be made of this schema: {' '.join(str(error).split())[:300]}") from error


def _call_grammar(function: Mapping[str, Any]) -> Any:
    from xgrammar import Grammar

    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    opening = json.dumps(f'{OPEN}{{"name": {json.dumps(function["name"])}, "arguments": ')
    closing = json.dumps(f"}}{CLOSE}")
    arguments = Grammar.from_json_schema(json.dumps(parameters), any_whitespace=False)
    return Grammar.concat(Grammar.from_ebnf(f"root ::= {opening}"), arguments, Grammar.from_ebnf(f"root ::= {closing}"))
