"""Tools of MCP servers as tools of the agent."""

import asyncio
import contextlib
import json
import logging
import os
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
from fastmcp import Client
from fastmcp.client.client import CallToolResult
from fastmcp.client.transports import ClientTransport, StdioTransport, StreamableHttpTransport
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, Tool

from configs.errors import whole_letters
from envs.sandbox.protocol import cut_middle, printable_text
from envs.tools.arguments import arguments_of
from envs.tools.closing import close_later
from envs.types import ToolResult, ToolUnavailableError

SCHEME = "mcp:"
UNAVAILABLE = "unavailable"
"""Category in a result's `_meta.error` with which our own server reports a fault that the caller did not cause."""
MAX_RESPONSE_BYTES = 1 << 20
MAX_LINE_CHARS = 200
"""Longest description, and longest list of parameters, that a server's tool brings to the prompt."""
MIN_KEPT_CHARS = 4000
"""Least limit of a result: the block list sees only the text that is left."""
_CLOSING_S = 10.0

# Its warnings quote servers, and a server may quote the key that it received.
logging.getLogger("mcp.client").setLevel(logging.CRITICAL)


class McpTool:
    """A tool of an MCP server, made for one episode, so that a server's memory never passes from task to task.

    It connects at its first call and keeps the connection until `close`. A result is foreign, has no control
    characters, and is cut in the middle. Raises ValueError if the source names no server.

    Args:
        source: `mcp:https://host/path#tool` or `mcp:command with arguments#tool`; a server's only tool needs no name.
        name: The action. It and the description are the user's: the server's own are foreign text.
        description: The tool's line in the planner's prompt.
        key: The variable with the server's API key, and the key, which is redacted in what the server returns.
        time_limit_s: The limit of one call, which covers connecting.
        max_chars: The limit of a result, at least MIN_KEPT_CHARS.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        description: str,
        key: tuple[str, str] | None = None,
        time_limit_s: float = 30.0,
        max_chars: int = MIN_KEPT_CHARS,
    ) -> None:
        self.name = name
        self.description = description
        self._server, self._command, self._tool = parse_source(source)
        self._key = key
        self._time_limit_s = time_limit_s
        self._max_chars = max(MIN_KEPT_CHARS, max_chars)
        self._client: Client[ClientTransport] | None = None
        self._parameters: dict[str, object] | None = None

    async def call(self, arguments: str) -> ToolResult:
        try:
            async with asyncio.timeout(self._time_limit_s):
                result = await self._call(whole_letters(arguments))
        except ToolUnavailableError as error:
            raise ToolUnavailableError(self._without_key(str(error))) from None
        except Exception as error:
            self.close()
            # The server's own words are not repeated.
            late = f"no answer within {self._time_limit_s} s"
            problem = late if isinstance(error, TimeoutError) else f"the connection broke ({type(error).__name__})"
            raise ToolUnavailableError(f"the MCP server at {self._shown} failed: {problem}") from None
        clean = printable_text(self._without_key(result.text).encode(errors="replace"))
        return ToolResult(text=cut_middle(clean, self._max_chars), error=result.error, foreign=True)

    def close(self) -> None:
        """Start to end the connection, and the process of a command; `until_closed` waits for it."""
        client, self._client, self._parameters = self._client, None, None
        if client is not None:
            close_later(_close(client))

    async def _call(self, text: str) -> ToolResult:
        if self._parameters is None:
            self._parameters = await self._connect()
        try:
            arguments = arguments_of(text, self._parameters)
        except ValueError as error:
            return ToolResult(text=f"Wrong arguments: {error}", error="bad_arguments")
        assert self._client is not None
        try:
            answer = await self._client.call_tool(self._tool, arguments, raise_on_error=False)
        except MCPError as error:
            if error.error.code == INVALID_PARAMS:
                return ToolResult(text=error.error.message, error="bad_arguments")
            raise
        if answer.is_error and (answer.meta or {}).get("error") == UNAVAILABLE:
            raise ToolUnavailableError(f"the MCP server reports that its tool '{self._tool}' is unavailable")
        return ToolResult(text=_text_of(answer), error="tool_error" if answer.is_error else None)

    async def offered(self) -> dict[str, str]:
        """Connect, and return what the server says of each of its tools, in one line of foreign text, by name.

        Raises ToolUnavailableError.
        """
        try:
            async with asyncio.timeout(self._time_limit_s):
                return {tool.name: self._without_key(_line_of(tool)) for tool in await self._listed()}
        except Exception as error:
            by_hand = "start its command in a shell to see why" if self._command else "check that it runs"
            raise ToolUnavailableError(
                f"the MCP server at {self._shown} failed ({type(error).__name__}); {by_hand}"
            ) from None

    async def _listed(self) -> list[Tool]:
        try:
            # The older handshake opens a session, in which a server may remember; the newest protocol has none.
            client = await self._open("legacy")
        except MCPError:
            self.close()
            client = await self._open("auto")
        return await client.list_tools(max_pages=10)

    async def _connect(self) -> dict[str, object]:
        """Connect, and return the parameters of the tool; raises ToolUnavailableError if the server lacks it."""
        tools = {tool.name: tool.input_schema for tool in await self._listed()}
        self._tool = self._tool or (next(iter(tools)) if len(tools) == 1 else "")
        if self._tool not in tools:
            self.close()
            offered = ", ".join(printable_text(name[:64].encode(errors="replace")) for name in list(tools)[:20])
            problem = f"has no tool '{self._tool}'" if self._tool else "has several tools or none: choose with #name"
            raise ToolUnavailableError(f"the MCP server at {self._shown} {problem}; it offers {offered or 'none'}")
        return tools[self._tool]

    async def _open(self, mode: str) -> Client[ClientTransport]:
        transport: ClientTransport
        if self._command:
            environment = {self._key[0]: self._key[1]} if self._key else {}
            program, *arguments = self._command
            # The process gets PATH, HOME and the like, and its key, but no other variable of this process.
            quiet = Path(os.devnull)
            transport = StdioTransport(program, arguments, env=environment, keep_alive=False, log_file=quiet)
        else:
            headers = {"Authorization": f"Bearer {self._key[1]}"} if self._key else {}
            transport = StreamableHttpTransport(self._server, headers=headers, httpx_client_factory=_http_client)
        self._client = Client(transport, mode=mode, log_handler=_ignore_log, init_timeout=self._time_limit_s)
        await self._client.__aenter__()
        return self._client

    @property
    def _shown(self) -> str:
        """The server for messages, without the parts of a URL that may hold secrets."""
        if self._command:
            return f"'{self._command[0]}'"
        parts = urlsplit(self._server)
        return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"

    def _without_key(self, text: str) -> str:
        return text.replace(self._key[1], "[key]") if self._key else text


def _line_of(tool: Tool) -> str:
    """Return the beginning of a tool's description and its parameters with their types, in one line."""
    first = " ".join((tool.description or tool.name).strip().split("\n\n")[0].split())[:MAX_LINE_CHARS]
    parameters = tool.input_schema.get("properties", {})
    types = {
        name: schema.get("type", "any") if isinstance(schema, dict) else "any" for name, schema in parameters.items()
    }
    shown = ", ".join(f'"{name}": {kind}' for name, kind in types.items())[:MAX_LINE_CHARS]
    return " ".join(printable_text(f"{first} {{{shown}}}".encode(errors="replace")).split())


def parse_source(source: str) -> tuple[str, tuple[str, ...], str]:
    """Return the URL, or else the command, and the tool, which may be empty. Raises ValueError."""
    server, _, tool = source.removeprefix(SCHEME).partition("#")
    if server.startswith(("http://", "https://")):
        # `port` raises ValueError for an invalid one.
        if urlsplit(server).hostname and urlsplit(server).port != 0:
            return server, (), tool
    elif (command := tuple(shlex.split(server))) and "://" not in command[0]:
        return "", command, tool
    raise ValueError(
        f"'{source}' names no MCP server; write mcp:https://host/path or mcp:command, and add #name for one tool"
    )


async def _ignore_log(message: object) -> None:
    """Drop a server's log lines, which are foreign text."""


async def _close(client: Client[ClientTransport]) -> None:
    # A broken connection is closed too, and may fail again.
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_CLOSING_S):
            await client.close()


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


def _http_client(headers: dict[str, str] | None = None, *_: object, **__: object) -> httpx2.AsyncClient:
    """Return a client whose uncompressed responses are bounded, because the protocol's own reads any size.

    It ignores proxies of the environment, and leaves redirects to the session, which follows those within the server's
    own origin. The limit of a call ends what takes too long.
    """
    return httpx2.AsyncClient(
        headers=(headers or {}) | {"accept-encoding": "identity"},
        timeout=None,
        transport=httpx2.AsyncHTTPTransport(),
        event_hooks={"response": [_bound]},
    )


async def _bound(response: httpx2.Response) -> None:
    if response.headers.get("content-encoding", "identity") != "identity":
        await response.aclose()
        raise httpx2.ReadError("a compressed response")
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = _BoundedStream(response.stream)


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for chunk in self._stream:
            num_bytes += len(chunk)
            if num_bytes > MAX_RESPONSE_BYTES:
                raise httpx2.ReadError(f"a response of more than {MAX_RESPONSE_BYTES} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
