"""A tool of an MCP server as a tool of the agent: where the server is, which key it wants, how it is asked."""

import asyncio
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from fastmcp import Client
from fastmcp.client.client import CallToolResult
from fastmcp.client.transports import ClientTransport
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS

from configs.errors import MAX_DEPTH, UserError, check_depth, in_whole_letters, whole_letters
from envs.sandbox.outcome import cut_middle, printable_text
from envs.tools.mcp_transports import BoundedHttp, BoundedStdio
from envs.types import ToolResult, ToolUnavailableError

SCHEME = "mcp:"
UNAVAILABLE = "unavailable"
"""Category, in a result's `_meta.error`, by which our own server says that the caller's input was not to blame."""
_RESTARTED = "[The server was connected to anew: what it remembered of earlier calls may be gone.]\n"
_CLOSING_S = 5.0


class McpAddressError(UserError):
    """An address that names no MCP server; the message says what one looks like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpAddress:
    """Where a server is: a URL or a command with its arguments; and which of its tools, if not its only one."""

    url: str | None
    command: tuple[str, ...]
    tool: str | None

    @classmethod
    def parse(cls, text: str) -> "McpAddress":
        """Read `mcp:https://host/path#tool` or `mcp:command with arguments#tool`. Raises McpAddressError."""
        target, _, tool = text.removeprefix(SCHEME).partition("#")
        if target.startswith(("http://", "https://")) and _has_host(target):
            return cls(url=target, command=(), tool=tool or None)
        try:
            command = tuple(shlex.split(target))
        except ValueError as error:
            raise McpAddressError(f"'{text}' is no command line: {error}") from None
        if not text.startswith(SCHEME) or not command or "://" in command[0]:
            raise McpAddressError(
                f"'{text}' names no MCP server; write mcp:https://host/path or mcp:command, and add #name for one tool"
            )
        return cls(url=None, command=command, tool=tool or None)

    def __str__(self) -> str:
        """For messages: without what a URL may hold of secrets."""
        if self.url is None:
            return f"'{self.command[0]}'"
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # What is no port raises ValueError, too.
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class McpKey:
    """A server's API key, and the variable that a command gets it in. Neither `repr` nor `str` shows it."""

    variable: str
    value: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class McpLimits:
    """The bounds of one call. `time_limit_s` covers connecting and, after a broken connection, the second try."""

    time_limit_s: float = 30.0
    max_message_bytes: int = 1 << 20
    max_chars: int = 4000


class McpTool:
    """Connects at its first call and keeps the connection until `close`: one object per episode, so that what a server
    remembers never passes from task to task.

    `key` goes to the server, and to nobody else: what the server quotes of it is replaced.
    A tool with one string parameter gets the planner's input as it is; any other a JSON object. `name` and
    `description` are the user's, because the server's own description would be an outsider's text in the planner's
    prompt. A result is `foreign`, without control characters, and cut in the middle beyond `max_chars`. A broken
    connection is made anew once per call, which may repeat the call.
    """

    def __init__(
        self,
        address: McpAddress,
        *,
        name: str,
        description: str,
        key: McpKey | None,
        limits: McpLimits,
    ) -> None:
        self.name = name
        self.description = description
        self._address = address
        self._key = key
        self._limits = limits
        self._connection: _Connection | None = None
        self._was_connected = False

    async def call(self, arguments: str) -> ToolResult:
        text = whole_letters(arguments)
        try:
            async with asyncio.timeout(self._limits.time_limit_s):
                return await self._call_with_reconnect(text)
        except ToolUnavailableError as error:
            raise ToolUnavailableError(self._without_key(str(error))) from None
        except TimeoutError:
            await self._hang_up()
            raise ToolUnavailableError(
                f"the MCP server at {self._address} gave no answer within {self._limits.time_limit_s} s"
            ) from None

    def close(self) -> None:
        """End the connection, and the server where it is a command's; from within the event loop it is done soon."""
        connection, self._connection = self._connection, None
        if connection is not None:
            closing = asyncio.get_running_loop().create_task(_close(connection.client))
            _closing.add(closing)
            closing.add_done_callback(_closing.discard)

    async def _call_with_reconnect(self, text: str) -> ToolResult:
        was_connected = self._connection is not None
        try:
            return await self._call(text)
        except _BrokenError as error:
            if not was_connected or error.is_fault:
                raise ToolUnavailableError(f"the MCP server at {self._address} failed: {error}") from None
        try:
            return await self._call(text)
        except _BrokenError as error:
            raise ToolUnavailableError(f"the MCP server at {self._address} failed twice: {error}") from None

    async def _call(self, text: str) -> ToolResult:
        is_new_again = self._connection is None and self._was_connected
        try:
            if self._connection is None:
                self._connection = await _connect(self._address, self._key, self._limits)
                self._was_connected = True
            result = await self._connection.call(text)
        except _BrokenError:
            await self._hang_up()
            raise
        kept = printable_text(self._without_key(result.text).encode(errors="replace"))
        kept = cut_middle(kept, self._limits.max_chars)
        return ToolResult(text=_RESTARTED * is_new_again + kept, error=result.error, foreign=True)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key.value, "[key]") if self._key else text

    async def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await _close(connection.client)


_closing: set[asyncio.Task[None]] = set()
"""The event loop itself holds tasks only weakly."""


class _BrokenError(Exception):
    """The connection is of no more use. `is_fault`: the server sent what it must not, and would again."""

    def __init__(self, message: str, *, is_fault: bool = False) -> None:
        super().__init__(message)
        self.is_fault = is_fault


@dataclass(frozen=True, slots=True)
class _Connection:
    client: Client[ClientTransport]
    tool: str
    parameters: Mapping[str, object]

    async def call(self, text: str) -> ToolResult:
        arguments = _arguments(text, self.parameters)
        if isinstance(arguments, ToolResult):
            return arguments
        try:
            answer = await self.client.call_tool(self.tool, arguments, raise_on_error=False)
        except MCPError as error:
            if error.error.code == INVALID_PARAMS:
                return ToolResult(text=error.error.message, error="bad_arguments")
            raise _broken(self.client, error) from None
        except Exception as error:
            raise _broken(self.client, error) from None
        category = (answer.meta or {}).get("error")
        if answer.is_error and category == UNAVAILABLE:
            raise ToolUnavailableError(f"the MCP server says that its tool '{self.tool}' is unavailable")
        return ToolResult(text=_text_of(answer), error="tool_error" if answer.is_error else None)


async def _connect(address: McpAddress, key: McpKey | None, limits: McpLimits) -> _Connection:
    """Raises _BrokenError, or ToolUnavailableError when the server lacks the tool."""
    try:
        # The older handshake opens a session, in which a server may remember; the newest protocol has none.
        client, tools = await _greet(address, key, limits, "legacy")
    except MCPError:
        try:
            client, tools = await _greet(address, key, limits, "auto")
        except MCPError as error:
            raise _BrokenError(f"it refused both handshakes (code {error.error.code})") from None
    chosen = address.tool or (next(iter(tools)) if len(tools) == 1 else "")
    if chosen not in tools:
        await _close(client)
        offered = ", ".join(printable_text(name[:64].encode(errors="replace")) for name in list(tools)[:20])
        wanted = f"has no tool '{address.tool}'" if address.tool else "has not one tool: choose with #name"
        raise ToolUnavailableError(f"the MCP server at {address} {wanted}; it offers {offered or 'none'}")
    return _Connection(client, chosen, tools[chosen])


async def _greet(
    address: McpAddress, key: McpKey | None, limits: McpLimits, mode: str
) -> tuple[Client[ClientTransport], dict[str, dict[str, object]]]:
    """A connected client, and the parameters of each tool. Raises MCPError where the server refuses."""
    transport: BoundedHttp | BoundedStdio
    if address.url:
        headers = {"Authorization": f"Bearer {key.value}"} if key else {}
        transport = BoundedHttp(address.url, headers=headers, max_bytes=limits.max_message_bytes)
    else:
        variables = {key.variable: key.value} if key else {}
        transport = BoundedStdio(address.command, variables=variables, max_bytes=limits.max_message_bytes)
    client: Client[ClientTransport] = Client(
        transport, mode=mode, log_handler=_ignore, init_timeout=limits.time_limit_s
    )
    try:
        await client.__aenter__()
        return client, {tool.name: tool.input_schema for tool in await client.list_tools(max_pages=10)}
    except BaseException as error:
        await _close(client)
        if (isinstance(error, MCPError) and not transport.fault) or not isinstance(error, Exception):
            raise
        raise _broken(client, error) from None


async def _close(client: Client[ClientTransport]) -> None:
    try:
        async with asyncio.timeout(_CLOSING_S):
            await client.close()
    except Exception:  # it was broken already, which is why it is closed
        pass


async def _ignore(message: object) -> None:
    """A server's log lines are an outsider's text: they reach no log of ours."""


def _broken(client: Client[ClientTransport], error: Exception) -> _BrokenError:
    """Without the server's own words."""
    fault = getattr(client.transport, "fault", None)
    return _BrokenError(fault or f"the connection broke ({type(error).__name__})", is_fault=fault is not None)


def _arguments(text: str, schema: Mapping[str, object]) -> dict[str, object] | ToolResult:
    """The planner's one text as the arguments of a tool with this schema, or what was wrong with it."""
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, dict) else {}
    needed = [name for name in (required if isinstance(required, list) else ()) or properties if name in properties]
    if len(needed) == 1 and _takes_text(properties[needed[0]]):
        return {needed[0]: text}
    if not properties:
        return {}
    value: object = None
    bound = ""
    try:
        value = _sendable(text)
    except ValueError:
        pass
    except RecursionError:
        bound = f", nested at most {MAX_DEPTH} deep"
    if isinstance(value, dict):
        return value
    fields = ", ".join(f"{name} ({_type_of(one)})" for name, one in list(properties.items())[:20])
    return ToolResult(text=f"The tool takes a JSON object with the fields {fields}{bound}.", error="bad_arguments")


def _sendable(text: str) -> object:
    """The value of JSON. Raises ValueError where it is none, as with a number beyond all bounds, and RecursionError
    where it is nested too deep."""
    value = in_whole_letters(json.loads(text))
    json.dumps(value, allow_nan=False)
    check_depth(value)
    return value


def _takes_text(field: object) -> bool:
    return _type_of(field) in ("string", "any")


def _type_of(field: object) -> str:
    return str(field.get("type", "any")) if isinstance(field, dict) else "any"


def _text_of(answer: CallToolResult) -> str:
    """The text of a result; what is no text is named."""
    parts = []
    for block in answer.content:
        resource = getattr(block, "resource", None)
        text = getattr(block, "text", None) or getattr(resource, "text", None)
        parts.append(text if text is not None else f"[{block.type} left out]" if block.type != "text" else "")
    if not parts and answer.structured_content is not None:
        return json.dumps(answer.structured_content, ensure_ascii=False)
    return "\n".join(parts)
