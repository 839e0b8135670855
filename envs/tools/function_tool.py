"""Custom tools: functions, classes, and tools of MCP servers.

A function of one text without a default gets the planner's `action_input` as it is. Any other gets its arguments from a
JSON object, which holds all in the function's order, so that a grammar needs no optional parts and strict servers
accept the schema; `null` selects the default.
"""

import asyncio
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NotRequired, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from configs.api_keys import required_key, without_secrets
from configs.envs import BUILT_IN_ACTIONS, EnvsConfig, ToolConfig
from configs.errors import UserError, listed, reason
from configs.plugins import failure, in_a_thread, load_own
from envs.tools.arguments import arguments_of
from envs.tools.closing import until_closed
from envs.types import Schema, Tool, ToolResult, ToolUnavailableError

SERVER_LIMIT_S = 60.0
"""Wall-clock limit of a question to an MCP server about its tools."""
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
_SUPPORTED = "str, int, float, bool, Literal, a list or Optional of these"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class FunctionTool:
    """A function as a tool, shared by all episodes; a plain one runs in a thread.

    An exception becomes a result that the planner reads, except ToolUnavailableError. A returned text is shown as it
    is, other values as JSON.
    """

    def __init__(self, name: str, function: Callable[..., object], signature: inspect.Signature) -> None:
        """Read the function's arguments; raises TypeError for an argument that the planner could not write."""
        self.name = name
        self._function = function
        schemas = {name: _schema_of(parameter) for name, parameter in signature.parameters.items()}
        self._defaults = {name for name, one in signature.parameters.items() if one.default is not one.empty}
        types = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        types |= {name: NotRequired[types[name]] for name in self._defaults}
        typed_dict: Any = TypedDict  # a type checker takes a call for a definition
        arguments = typed_dict("Arguments", types)
        arguments.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)
        self._arguments: TypeAdapter[dict[str, object]] = TypeAdapter(arguments)
        takes_text = list(schemas.values()) == [{"type": "string"}]
        self._accepts: Schema = {"properties": schemas, "required": [*schemas] if takes_text else []}
        self.schema: Schema | None = None
        """The JSON schema of `action_input`, or None for a text."""
        self.description = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
        if not self.description:
            raise TypeError("has no docstring; the planner reads there what the tool does")
        if not takes_text:
            self.description += f" {_shown(signature)}"
            self.schema = {
                "type": "object",
                "properties": schemas,
                "required": [*schemas],
                "additionalProperties": False,
            }

    async def call(self, arguments: str) -> ToolResult:
        try:
            values = arguments_of(arguments, self._accepts)
            given = {name: value for name, value in values.items() if value is not None or name not in self._defaults}
            values = self._arguments.validate_python(given)
        except ValueError as error:
            return ToolResult(text=f"Wrong arguments: {reason(error)}", error="bad_arguments")
        try:
            returned = await in_a_thread(self._function, **values)
            if inspect.isawaitable(returned):
                returned = await returned
        except ToolUnavailableError:
            raise
        except (Exception, SystemExit) as error:
            problem = without_secrets(f"{type(error).__name__}: {error}")
            return ToolResult(text=" ".join(problem.split()), error="tool_error")
        if isinstance(returned, ToolResult):
            return returned
        if isinstance(returned, str):
            return ToolResult(text=returned)
        try:
            return ToolResult(text=json.dumps(returned, ensure_ascii=False, default=str))
        except (TypeError, ValueError, RecursionError):
            return ToolResult(text=str(returned))


def _schema_of(parameter: inspect.Parameter) -> Schema:
    schema = _schema(parameter.annotation) if parameter.kind in _NAMED else None
    if schema is None:
        raise TypeError(f"argument '{parameter}' has no name or no type of {_SUPPORTED}")
    null = {"type": "null"}
    if parameter.default is not parameter.empty and null not in schema.get("anyOf", ()):
        return {"anyOf": [schema, null]}
    return schema


def _schema(kind: object) -> Schema | None:
    """Return the JSON schema of a type, or None if it is not supported."""
    if isinstance(kind, type) and kind in _JSON_TYPES:
        return {"type": _JSON_TYPES[kind]}
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return {"enum": list(parts)} if all(isinstance(part, str | int | NoneType) for part in parts) else None
    if get_origin(kind) not in (list, Union, UnionType):
        return None
    schemas = [_schema(part) for part in parts]
    if None in schemas:
        return None
    return {"type": "array", "items": schemas[0]} if get_origin(kind) is list else {"anyOf": schemas}


def _shown(signature: inspect.Signature) -> str:
    """Return the arguments as the planner's prompt shows them."""
    shown = []
    for parameter in signature.parameters.values():
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        shown.append(f'"{parameter.name}": {inspect.formatannotation(parameter.annotation)}{default}')
    return "{" + ", ".join(shown) + "}"


def function_tool(name: str, config: ToolConfig) -> FunctionTool | None:
    """Return the tool of a function, or None for a class or an MCP server; raises UserError."""
    if config.is_mcp:
        return None
    place = f"envs.tools.{name}"
    function = load_own(config.source, key=place, kind="function or a class")
    if inspect.isclass(function):
        return None
    try:
        # Evaluates annotations that are written as texts.
        return FunctionTool(name, function, inspect.signature(function, eval_str=True))
    except Exception as error:
        raise UserError(f"{place}: '{config.source}': {failure(error)}") from None


def function_schemas(config: EnvsConfig) -> dict[str, Schema]:
    """Return the schemas of the switched-on functions that take more than a text, by action; raises UserError."""
    tools = {name: function_tool(name, config.tools[name]) for name in config.actions if name in config.tools}
    return {name: tool.schema for name, tool in tools.items() if tool is not None and tool.schema is not None}


def own_descriptions(config: EnvsConfig) -> dict[str, str]:
    """Return the descriptions of the switched-on custom tools by action, without making a tool; raises UserError."""
    descriptions = {}
    for name, tool in ((name, config.tools[name]) for name in config.actions if name in config.tools):
        if tool.is_mcp:
            described: object = tool
        else:
            described = function_tool(name, tool) or load_own(tool.source, key=f"envs.tools.{name}", kind="class")
        description = getattr(described, "description", None)
        # A class may set it for its instances only.
        descriptions[name] = description if isinstance(description, str) else "a custom tool"
    return descriptions


def with_server_tools(config: EnvsConfig, *, run: Path) -> EnvsConfig:
    """Ask MCP servers for descriptions that a recipe leaves out and, with `#*`, for all their tools; raises UserError.

    The result names every tool and holds its description, so that it is the same for every worker and resume. What a
    server answered for the run in the folder `run` is not asked again.
    """
    if not any(tool.is_mcp and not tool.description for tool in config.tools.values()):
        return config
    tools, actions = dict(config.tools), list[str]()
    answered: dict[str, dict[str, str]] = {}
    if (run / "config.json").exists():
        for saved in json.loads((run / "config.json").read_text())["envs"]["tools"].values():
            server, _, name = saved["source"].partition("#")
            answered.setdefault(server, {})[name] = saved["description"]
    for action in config.actions:
        tool = config.tools.get(action)
        if tool is None or not tool.is_mcp or tool.description:
            actions.append(action)
            continue
        server, _, asked = tool.source.partition("#")
        offered = answered.get(server, {})
        if not offered or asked not in ("", "*", *offered):
            whole_server = tool.model_copy(update={"source": server})
            offered = asyncio.run(until_closed(_offered(action, whole_server)))
        if asked == "*":
            del tools[action]
            chosen = {re.sub(r"[^a-z0-9_]", "_", name.lower())[:40]: name for name in offered}
            if not offered or len(chosen) < len(offered):
                raise UserError(f"envs.tools.{action}: the server has no tools, or tools whose names are too alike")
        else:
            chosen = {action: asked or next(iter(offered), "")}
            if len(offered) > 1 and not asked:
                raise UserError(f"envs.tools.{action}: the server has several tools; add one of #{', #'.join(offered)}")
        for name, of_server in chosen.items():
            if of_server not in offered:
                raise UserError(f"envs.tools.{action}: the server has no tool '{of_server}', but {listed(offered)}")
            if name in {*BUILT_IN_ACTIONS, *actions, *config.actions, *tools} - {action} or not name[:1].isalpha():
                raise UserError(
                    f"envs.tools.{action}: the server's tool '{of_server}' cannot be an action under this name; add it "
                    f"alone under another, with source = '{server}#{of_server}'"
                )
            source, description = f"{server}#{of_server}", offered[of_server]
            tools[name] = tool.model_copy(update={"source": source, "description": description})
            actions.append(name)
    return config.model_copy(update={"tools": tools, "actions": tuple(actions)})


async def _offered(name: str, config: ToolConfig) -> dict[str, str]:
    tool: Any = custom_tool_factory(name, config, time_limit_s=SERVER_LIMIT_S, max_chars=0)()
    try:
        return await tool.offered()
    except ToolUnavailableError as error:
        raise UserError(f"envs.tools.{name}: {error}") from None
    finally:
        tool.close()


def custom_tool_factory(name: str, config: ToolConfig, *, time_limit_s: float, max_chars: int) -> Callable[[], Tool]:
    """Return a function that makes the tool of a class or an MCP server for one episode; raises UserError.

    The limits are those of one call to an MCP server.
    """
    if not config.is_mcp:
        return load_own(config.source, key=f"envs.tools.{name}", kind="class")
    from envs.tools.mcp import McpTool

    key = None
    if variable := config.api_key_env:
        key = variable, required_key(name, variable, f"or leave envs.tools.{name}.api_key_env out")
    return lambda: McpTool(
        config.source,
        name=name,
        description=config.description,
        key=key,
        time_limit_s=time_limit_s,
        max_chars=max_chars,
    )


def check_custom_tool(name: str, tool: object) -> None:
    """Check that an object has the parts of `envs.types.Tool`; raises UserError."""
    call: Any = getattr(tool, "call", None)
    is_tool = getattr(tool, "name", None) == name and hasattr(tool, "description")
    try:
        inspect.signature(call).bind("")
    except TypeError:
        is_tool = False
    if not is_tool or not inspect.iscoroutinefunction(call):
        raise UserError(
            f"envs.tools.{name}: {type(tool).__name__} is not a tool; write a class with name = '{name}', description "
            "and `async def call(self, arguments)`, which takes the planner's action_input"
        )
