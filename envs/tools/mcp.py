"""Tools of MCP servers as tools of the agent."""

import asyncio
import contextlib
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

from configs.errors import MAX_JSON_DEPTH, check_depth, in_whole_letters, whole_letters
from envs.sandbox.protocol import cut_middle, printable_text
from envs.tools.mcp_transports import BoundedHttp, BoundedStdio, in_background
from envs.types import ToolResult, ToolUnavailableError

SCHEME = "mcp:"
UNAVAILABLE = "unavailable"
"""Category in a result's `_meta.error` with which our own server reports a fault that the caller did not cause."""
_RESTARTED = "[The server was connected to again: what it remembered of earlier calls may be gone.]\n"
_CLOSING_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class McpAddress:
    """The location of a server: a URL, or a command with its arguments."""

    url: str | None
    command: tuple[str, ...]
    tool: str | None
    """One of its tools; None if it has only one."""

    @classmethod
    def parse(cls, text: str) -> "McpAddress":
        """Parse `mcp:https://host/path#tool` or `mcp:command with arguments#tool`; raises ValueError."""
        target, _, tool = text.removeprefix(SCHEME).partition("#")
        if target.startswith(("http://", "https://")):
            with contextlib.suppress(ValueError):
                parts = urlsplit(target)
                # `port` raises ValueError for an invalid one.
                if parts.hostname and parts.port != 0:
                    return cls(url=target, command=(), tool=tool or None)
        try:
            command = tuple(shlex.split(target))
        except ValueError as error:
            raise ValueError(f"'{text}' is not a command line: {error}") from None
        if not text.startswith(SCHEME) or not command or "://" in command[0]:
            raise ValueError(
                f"'{text}' names no MCP server; write mcp:https://host/path or mcp:command, and add #name for one tool"
            )
        return cls(url=None, command=command, tool=tool or None)

    def __str__(self) -> str:
        """Return the location for messages, without the parts of a URL that may hold secrets."""
        if self.url is None:
            return f"'{self.command[0]}'"
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"


@dataclass(frozen=True, slots=True)
class McpKey:
    """A server's API key. Neither `repr` nor `str` shows it."""

    variable: str
    """The variable in which a command gets it."""
    value: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class McpLimits:
    """The bounds of one call."""

    time_limit_s: float = 30.0
    """Covers connecting and the second try after a broken connection."""
    max_message_bytes: int = 1 << 20
    max_chars: int = 4000


class McpTool:
    """A tool of an MCP server, made for one episode, so that a server's memory never passes from task to task.

    It connects at its first call and keeps the connection until `close`. The key is sent only to the server, and
    redacted in what the server returns. A tool with one string parameter gets the planner's input as it is; any other
    a JSON object. `name` and `description` are the user's, because the server's own are foreign text and would enter
    the planner's prompt. A result is foreign, has no control characters, and is cut in the middle. After a broken
    connection a call connects again once, which may repeat the call.
    """

    def __init__(
        self, address: McpAddress, *, name: str, description: str, key: McpKey | None, limits: McpLimits
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
        """Start to end the connection, and the process of a command."""
        connection, self._connection = self._connection, None
        if connection is not None:
            in_background(_close(connection.client))

    async def _call_with_reconnect(self, text: str) -> ToolResult:
        tries = 1 if self._connection is None else 2
        for number in range(1, tries + 1):
            reconnects = self._connection is None and self._was_connected
            try:
                if self._connection is None:
                    self._connection = await _connect(self._address, self._key, self._limits)
                    self._was_connected = True
                result = await self._connection.call(text)
                break
            except _BrokenError as error:
                await self._hang_up()
                if number == tries or error.is_fault:
                    raise ToolUnavailableError(f"the MCP server at {self._address} failed: {error}") from None
        clean = printable_text(self._without_key(result.text).encode(errors="replace"))
        clean = cut_middle(clean, self._limits.max_chars)
        return ToolResult(text=_RESTARTED * reconnects + clean, error=result.error, foreign=True)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key.value, "[key]") if self._key else text

    async def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await _close(connection.client)


class _BrokenError(Exception):
    """A connection that cannot be used any more. `is_fault`: the server broke a bound, and would again."""

    def __init__(self, client: Client[ClientTransport] | None, problem: object) -> None:
        fault = getattr(client.transport, "fault", None) if client else None
        # The server's own words are not repeated.
        broke = problem if isinstance(problem, str) else f"the connection broke ({type(problem).__name__})"
        super().__init__(fault or broke)
        self.is_fault = fault is not None


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
            raise _BrokenError(self.client, error) from None
        except Exception as error:
            raise _BrokenError(self.client, error) from None
        if answer.is_error and (answer.meta or {}).get("error") == UNAVAILABLE:
            raise ToolUnavailableError(f"the MCP server reports that its tool '{self.tool}' is unavailable")
        return ToolResult(text=_text_of(answer), error="tool_error" if answer.is_error else None)


async def _connect(address: McpAddress, key: McpKey | None, limits: McpLimits) -> _Connection:
    """Connect to the server; raises _BrokenError, or ToolUnavailableError if the server lacks the tool."""
    try:
        # The older handshake opens a session, in which a server may remember; the newest protocol has none.
        client, tools = await _open_client(address, key, limits, "legacy")
    except MCPError:
        try:
            client, tools = await _open_client(address, key, limits, "auto")
        except MCPError as error:
            raise _BrokenError(None, f"it refused both handshakes (code {error.error.code})") from None
    chosen = address.tool or (next(iter(tools)) if len(tools) == 1 else "")
    if chosen not in tools:
        await _close(client)
        offered = ", ".join(printable_text(name[:64].encode(errors="replace")) for name in list(tools)[:20])
        problem = f"has no tool '{address.tool}'" if address.tool else "has several tools or none: choose with #name"
        raise ToolUnavailableError(f"the MCP server at {address} {problem}; it offers {offered or 'none'}")
    return _Connection(client, chosen, tools[chosen])


async def _open_client(
    address: McpAddress, key: McpKey | None, limits: McpLimits, mode: str
) -> tuple[Client[ClientTransport], dict[str, dict[str, object]]]:
    """Return a connected client and the parameters of each tool; raises MCPError if the server refuses."""
    transport: BoundedHttp | BoundedStdio
    if address.url:
        headers = {"Authorization": f"Bearer {key.value}"} if key else {}
        transport = BoundedHttp(address.url, headers=headers, max_bytes=limits.max_message_bytes)
    else:
        variables = {key.variable: key.value} if key else {}
        transport = BoundedStdio(address.command, variables=variables, max_bytes=limits.max_message_bytes)
    client: Client[ClientTransport] = Client(
        transport, mode=mode, log_handler=_ignore_log, init_timeout=limits.time_limit_s
    )
    try:
        await client.__aenter__()
        return client, {tool.name: tool.input_schema for tool in await client.list_tools(max_pages=10)}
    except BaseException as error:
        await _close(client)
        if (isinstance(error, MCPError) and not transport.fault) or not isinstance(error, Exception):
            raise
        raise _BrokenError(client, error) from None


async def _ignore_log(message: object) -> None:
    """Drop a server's log lines, which are foreign text."""


async def _close(client: Client[ClientTransport]) -> None:
    # A broken connection is closed too, and may fail again.
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_CLOSING_S):
            await client.close()


def _arguments(text: str, schema: Mapping[str, object]) -> dict[str, object] | ToolResult:
    """Return the planner's text as arguments of a tool with this schema, or the result that says what is wrong."""
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, dict) else {}
    needed = [name for name in (required if isinstance(required, list) else ()) or properties if name in properties]
    if len(needed) == 1 and _type_of(properties[needed[0]]) in ("string", "any"):
        return {needed[0]: text}
    if not properties:
        return {}
    bound = ""
    try:
        value = in_whole_letters(json.loads(text))
        # Rejects infinite numbers, which are not JSON.
        json.dumps(value, allow_nan=False)
        check_depth(value)
        if isinstance(value, dict):
            return value
    except ValueError:
        pass
    except RecursionError:
        bound = f", nested at most {MAX_JSON_DEPTH} deep"
    fields = ", ".join(f"{name} ({_type_of(kind)})" for name, kind in list(properties.items())[:20])
    return ToolResult(text=f"The tool takes a JSON object with the fields {fields}{bound}.", error="bad_arguments")


def _type_of(schema: object) -> str:
    return str(schema.get("type", "any")) if isinstance(schema, dict) else "any"


def _text_of(answer: CallToolResult) -> str:
    """Return the text of a result, with the type of each block that has no text."""
    parts = []
    for block in answer.content:
        resource = getattr(block, "resource", None)
        text = getattr(block, "text", None) or getattr(resource, "text", None)
        parts.append(text if text is not None else f"[{block.type} left out]" if block.type != "text" else "")
    if not parts and answer.structured_content is not None:
        return json.dumps(answer.structured_content, ensure_ascii=False)
    return "\n".join(parts)
