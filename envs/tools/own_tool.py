"""Tools of one's own: from the `source` that a recipe names to an object that can be called."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from configs.envs import OwnToolConfig
from configs.own import OwnCodeError, load_own
from envs.tools.keys import ToolSetupError, read_key


def own_maker(name: str, config: OwnToolConfig) -> Callable[[], Any]:
    """What makes the tool, once for every episode. Raises ToolSetupError."""
    if config.is_mcp:
        from envs.tools.mcp import McpAddress, McpAddressError, McpKey, McpTool

        try:
            address = McpAddress.parse(config.source)
        except McpAddressError as error:
            raise ToolSetupError(f"envs.tools.{name}: {error}") from None
        key = None
        if variable := config.api_key_env:
            key = McpKey(variable, read_key(name, variable, f"or leave envs.tools.{name}.api_key_env out"))
        return partial(McpTool, address, name=name, description=config.description, key=key)
    try:
        return load_own(config.source, key=f"envs.tools.{name}", kind="class")
    except OwnCodeError as error:
        raise ToolSetupError(str(error)) from error


def make_first(name: str, make: Callable[[], Any]) -> Any:
    """The first of a run's tools. Raises ToolSetupError."""
    try:
        return make()
    except Exception as error:
        raise ToolSetupError(
            f"envs.tools.{name}: the tool cannot be made without arguments, as each task needs it: "
            f"{type(error).__name__}: {error}"
        ) from error


def check_own(name: str, tool: Any) -> None:
    """Whether it has the parts of `envs.types.Tool`. Raises ToolSetupError."""
    kind = type(tool).__name__
    missing = [part for part in ("name", "description", "call") if not hasattr(tool, part)]
    if missing:
        raise ToolSetupError(
            f"envs.tools.{name}: {kind} has no `{missing[0]}`; a tool is a class with name, description and "
            "`async def call(self, arguments)`"
        )
    if tool.name != name:
        raise ToolSetupError(f"envs.tools.{name}: the tool is named '{tool.name}'; use that name in the recipe")
    if not inspect.iscoroutinefunction(tool.call):
        raise ToolSetupError(
            f"envs.tools.{name}: `call` of {kind} is not async; write `async def call(self, arguments)`"
        )
    try:
        inspect.signature(tool.call).bind("")
    except TypeError as error:
        raise ToolSetupError(
            f"envs.tools.{name}: `call` of {kind} takes one text, the planner's action_input ({error}); write "
            "`async def call(self, arguments)`"
        ) from None
