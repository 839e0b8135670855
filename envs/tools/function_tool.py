"""Tools of one's own: functions, classes, and those of MCP servers.

A function's docstring is the description, its typed arguments are what the planner fills. A function of one text
without a default reads the planner's `action_input` as it is. Any other gets its arguments by name from a JSON object.
That object has every argument in the function's order, so that a grammar can say it without optional parts and a strict
server takes its schema; `null` where there is a default means the default.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from configs.api_keys import without_secrets
from configs.envs import EnvsConfig, ToolConfig
from configs.errors import UserError, in_whole_letters, read_key
from configs.plugins import OwnCodeError, in_a_thread, load_own
from envs.types import Schema, ToolResult, ToolUnavailableError

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
_SUPPORTED = "str, int, float, bool, Literal, a list or Optional of these"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class FunctionTool:
    """A plain function runs in a thread, side by side with others; it keeps no state, so all episodes share the tool.

    What it raises is a result that the planner reads, ToolUnavailableError is a fault of the tool. What it returns is
    shown as it is where it is a text, as JSON where it is not.
    """

    def __init__(self, name: str, function: Callable[..., object], signature: inspect.Signature) -> None:
        """Raises TypeError for an argument that the planner could not write."""
        self.name = name
        self._function = function
        self._signature = signature
        self._arguments = {one.name: _argument(one) for one in signature.parameters.values()}
        summary = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
        if not summary:
            raise TypeError("has no docstring; write in one what the tool does, the planner reads it")
        self.description = summary if self._takes_text else f"{summary} {_shown(signature)}"

    @property
    def schema(self) -> Schema | None:
        """The JSON schema of `action_input`; None where it is a text."""
        if self._takes_text:
            return None
        return {
            "type": "object",
            "properties": {name: argument.schema for name, argument in self._arguments.items()},
            "required": list(self._arguments),
            "additionalProperties": False,
        }

    @property
    def _takes_text(self) -> bool:
        return [argument.schema for argument in self._arguments.values()] == [{"type": "string"}]

    async def call(self, arguments: str) -> ToolResult:
        try:
            given = self._given(arguments)
        except ValueError as error:
            return ToolResult(text=f"Wrong arguments: {error}", error="bad_arguments")
        try:
            returned = await in_a_thread(self._function, **given)
            if inspect.isawaitable(returned):
                returned = await returned
            return returned if isinstance(returned, ToolResult) else ToolResult(text=_written(returned))
        except ToolUnavailableError:
            raise
        except (Exception, SystemExit) as error:
            said = without_secrets(f"{type(error).__name__}: {error}")
            return ToolResult(text=" ".join(said.split()), error="tool_error")

    def _given(self, text: str) -> dict[str, object]:
        """Raises ValueError."""
        if self._takes_text:
            return dict.fromkeys(self._arguments, text)
        try:
            values = in_whole_letters(json.loads(text))
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        try:
            self._signature.bind(**values)
        except TypeError as error:
            raise ValueError(str(error)) from None
        written = {name: self._arguments[name].read(name, value) for name, value in values.items()}
        return {
            name: value for name, value in written.items() if value is not None or not self._arguments[name].has_default
        }


def _written(returned: object) -> str:
    """As JSON, or as Python writes it where JSON has no such keys, or where it holds itself."""
    if isinstance(returned, str):
        return returned
    try:
        return json.dumps(returned, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(returned)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    schema: Schema
    type: TypeAdapter[object]
    has_default: bool

    def read(self, name: str, value: object) -> object:
        """Raises ValueError."""
        if value is None and self.has_default:
            return None
        try:
            return self.type.validate_python(value, strict=True)
        except ValidationError as error:
            raise ValueError(f"{name}: {error.errors()[0]['msg']}") from None


def function_tool(name: str, config: ToolConfig) -> FunctionTool | None:
    """None for a class and for a tool of an MCP server. Raises UserError."""
    if config.is_mcp:
        return None
    place = f"envs.tools.{name}"
    try:
        found = load_own(config.source, key=place, kind="function or a class")
    except OwnCodeError as error:
        raise UserError(str(error)) from error
    if inspect.isclass(found):
        return None
    try:
        return FunctionTool(name, found, _signature(found))
    except TypeError as error:
        raise UserError(f"{place}: '{config.source}': {error}") from None


def function_schemas(config: EnvsConfig) -> dict[str, Schema]:
    """The arguments of the switched-on functions that take more than a text, by action. Raises UserError."""
    tools = {name: function_tool(name, config.tools[name]) for name in config.actions if name in config.tools}
    return {name: tool.schema for name, tool in tools.items() if tool is not None and tool.schema is not None}


def own_descriptions(config: EnvsConfig) -> dict[str, str]:
    """What the planner is told of the switched-on tools of one's own, by action. No tool is made for it: of a class
    that says it of its instances only nothing is known. Raises UserError."""
    return {name: _description(name, config.tools[name]) for name in config.actions if name in config.tools}


def _description(name: str, config: ToolConfig) -> str:
    if config.is_mcp:
        return config.description
    if function := function_tool(name, config):
        return function.description
    said = getattr(load_own(config.source, key=f"envs.tools.{name}", kind="class"), "description", None)
    return said if isinstance(said, str) else "a tool of its own"


def _signature(function: Callable[..., object]) -> inspect.Signature:
    """With its types, also those that are written as texts. Raises TypeError."""
    try:
        return inspect.signature(function, eval_str=True)
    except Exception as error:
        raise TypeError(f"its types cannot be read: {type(error).__name__}: {error}") from None


def _argument(parameter: inspect.Parameter) -> _Argument:
    if parameter.kind not in _NAMED:
        raise TypeError(f"argument '{parameter.name}' is {parameter.kind.description}; name each argument")
    if parameter.annotation is parameter.empty:
        raise TypeError(f"argument '{parameter.name}' has no type; write one of {_SUPPORTED}")
    schema = _schema(parameter.annotation)
    if schema is None:
        shown = inspect.formatannotation(parameter.annotation)
        raise TypeError(f"argument '{parameter.name}' is {shown}; write one of {_SUPPORTED}")
    has_default = parameter.default is not parameter.empty
    null = {"type": "null"}
    if has_default and null not in schema.get("anyOf", ()):
        schema = {"anyOf": [schema, null]}
    return _Argument(schema=schema, type=TypeAdapter(parameter.annotation), has_default=has_default)


def _schema(kind: object) -> Schema | None:
    """None for a type that is not supported."""
    if isinstance(kind, type) and kind in _JSON_TYPES:
        return {"type": _JSON_TYPES[kind]}
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return {"enum": list(parts)} if all(isinstance(one, str | int | NoneType) for one in parts) else None
    if get_origin(kind) not in (list, Union, UnionType):
        return None
    schemas = [_schema(part) for part in parts]
    if None in schemas:
        return None
    return {"type": "array", "items": schemas[0]} if get_origin(kind) is list else {"anyOf": schemas}


def _shown(signature: inspect.Signature) -> str:
    """What the planner reads of the arguments."""
    shown = []
    for one in signature.parameters.values():
        default = "" if one.default is one.empty else f" = {one.default!r}"
        shown.append(f'"{one.name}": {inspect.formatannotation(one.annotation)}{default}')
    return "{" + ", ".join(shown) + "}"


def own_maker(name: str, config: ToolConfig, *, time_limit_s: float, max_chars: int) -> Callable[[], Any]:
    """What makes the tool, once for every episode. The limits are those of a call to a server. Raises
    UserError."""
    if config.is_mcp:
        from envs.tools.mcp import McpAddress, McpAddressError, McpKey, McpLimits, McpTool

        try:
            address = McpAddress.parse(config.source)
        except McpAddressError as error:
            raise UserError(f"envs.tools.{name}: {error}") from None
        key = None
        if variable := config.api_key_env:
            key = McpKey(variable, read_key(name, variable, f"or leave envs.tools.{name}.api_key_env out"))
        usual = McpLimits()
        # What is cut here is seen by nobody, by the block list neither.
        limits = replace(usual, time_limit_s=time_limit_s, max_chars=max(usual.max_chars, max_chars))
        return partial(McpTool, address, name=name, description=config.description, key=key, limits=limits)
    try:
        return load_own(config.source, key=f"envs.tools.{name}", kind="class")
    except OwnCodeError as error:
        raise UserError(str(error)) from error


def make_first(name: str, make: Callable[[], Any]) -> Any:
    """The first of a run's tools. Raises UserError."""
    try:
        return make()
    except Exception as error:
        raise UserError(
            f"envs.tools.{name}: the tool cannot be made without arguments, as each task needs it: "
            f"{type(error).__name__}: {error}"
        ) from error


def check_own(name: str, tool: Any) -> None:
    """Whether it has the parts of `envs.types.Tool`. Raises UserError."""
    kind = type(tool).__name__
    missing = [part for part in ("name", "description", "call") if not hasattr(tool, part)]
    if missing:
        raise UserError(
            f"envs.tools.{name}: {kind} has no `{missing[0]}`; a tool is a class with name, description and "
            "`async def call(self, arguments)`"
        )
    if tool.name != name:
        raise UserError(f"envs.tools.{name}: the tool is named '{tool.name}'; use that name in the recipe")
    if not inspect.iscoroutinefunction(tool.call):
        raise UserError(
            f"envs.tools.{name}: `call` of {kind} is not async; write `async def call(self, arguments)`"
        )
    try:
        inspect.signature(tool.call).bind("")
    except TypeError as error:
        raise UserError(
            f"envs.tools.{name}: `call` of {kind} takes one text, the planner's action_input ({error}); write "
            "`async def call(self, arguments)`"
        ) from None
