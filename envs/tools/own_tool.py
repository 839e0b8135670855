"""Tools of one's own: from the `source` that a recipe names to an object that can be called."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from configs.envs import OwnToolConfig
from envs.tools.keys import ToolSetupError, read_key

OUR_PACKAGES = ("configs", "envs", "rollout", "learner", "reward", "actors", "ray_jobs")


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
    module, _, attribute = config.source.partition(":")
    if os.getcwd() not in sys.path:
        # A command's own folder is on the path, not the one it is called in; last, so that it hides no module.
        sys.path.append(os.getcwd())
    try:
        made: Any = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        # A module of somebody else may fail in any way while it is imported.
        said = f"{type(error).__name__}: {error}{_taken(module, error)}"
        raise ToolSetupError(f"envs.tools.{name}: '{config.source}' cannot be imported: {said}") from error
    if not callable(made):
        raise ToolSetupError(f"envs.tools.{name}: '{config.source}' is a {type(made).__name__}; name a class")
    return made


def make_first(name: str, make: Callable[[], Any]) -> Any:
    """The first of a run's tools. Raises ToolSetupError."""
    if inspect.isfunction(make) and inspect.signature(make).parameters:
        raise ToolSetupError(
            f"envs.tools.{name}: '{make.__name__}' is a function; a tool is a class with name, description and "
            "`async def call(self, arguments)`"
        )
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


def _taken(module: str, error: Exception) -> str:
    """Our packages hide a module of the same name in the user's folder."""
    name = (error.name if isinstance(error, ModuleNotFoundError) else None) or module
    package = name.partition(".")[0]
    if package not in OUR_PACKAGES:
        return ""
    return f"; '{package}' is a package of agentflow and hides your own of this name: give yours another"
