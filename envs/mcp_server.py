"""The switched-on tools as an MCP server: stdio for one client, HTTP for many, each connection with its own state."""

import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal

from fastmcp import FastMCP
from fastmcp.server.dependencies import get_context
from fastmcp.tools.base import ToolResult as McpResult
from mcp.types import TextContent
from pydantic import Field
from starlette.middleware import Middleware

from configs.api_keys import find_key
from configs.errors import UserError, whole_letters
from envs.serving import LOOPBACK, TokenGate, listen, new_token, with_token
from envs.tools.mcp import UNAVAILABLE
from envs.tools.toolbox import AnswerTool, ThinkTool, Toolbox
from envs.types import Tool, ToolResult, ToolUnavailableError

Transport = Literal["stdio", "http"]

TOKEN_VARIABLE = "AGENTFLOW_TOOLS_TOKEN"
"""Holds the token of the HTTP server; if it is unset, each start makes a new one."""
MAX_INPUT_CHARS = 100_000
MAX_SESSIONS = 64


class _Sessions:
    """The tools of each connection, at most MAX_SESSIONS. Over stdio there is one.

    Over HTTP a connection of the protocol with a handshake lasts until its client closes it or was idle for the time
    that the protocol's SDK sets; without a handshake each request is a connection.
    """

    def __init__(self, toolbox: Toolbox, transport: Transport) -> None:
        self._toolbox = toolbox
        self._transport = transport
        self._open: set[int] = set()
        self._of_process: dict[str, Any] = {}
        self._ends_with_process = AsyncExitStack()

    @contextlib.asynccontextmanager
    async def lifespan(self, server: object) -> AsyncIterator[None]:
        """Close the session of stdio with the server."""
        async with self._ends_with_process:
            yield

    def tools(self) -> dict[str, Tool]:
        """Return the tools of the caller's connection by name; raises UserError if all sessions are in use."""
        state, stack = self._of_process, self._ends_with_process
        request = get_context().request_context
        if self._transport == "http" and request is not None:
            # An interpreter ends with its connection; FastMCP's own session state closes nothing.
            connection = request.session._connection
            state, stack = connection.state, connection.exit_stack
        if "tools" not in state:
            if len(self._open) >= MAX_SESSIONS:
                raise UserError(f"all {MAX_SESSIONS} sessions are in use; close a connection")
            self._open.add(id(state))
            stack.callback(self._open.discard, id(state))
            state["tools"] = {tool.name: tool for tool in stack.enter_context(self._toolbox.episode())}
        tools: dict[str, Tool] = state["tools"]
        return tools


def build_server(toolbox: Toolbox, *, transport: Transport) -> FastMCP:
    """Return a FastMCP server that offers the toolbox's tools, except the planner's own moves `think` and `answer`.

    Every failure is a result with `isError` and its category in `_meta.error`; the category UNAVAILABLE is a fault that
    the caller's input did not cause. The caller closes the toolbox.
    """
    sessions = _Sessions(toolbox, transport)
    server = FastMCP("agentflow-tools", lifespan=sessions.lifespan)
    with toolbox.episode() as tools:
        for tool in tools:
            if not isinstance(tool, ThinkTool | AnswerTool):
                _offer(server, sessions, tool.name, tool.description)
    return server


def _offer(server: FastMCP, sessions: _Sessions, name: str, description: str) -> None:
    async def call(
        input: Annotated[str, Field(max_length=MAX_INPUT_CHARS, description="the input of the tool, as plain text")],
    ) -> McpResult:
        try:
            result = await sessions.tools()[name].call(input)
        except (ToolUnavailableError, UserError) as error:
            result = ToolResult(text=f"The tool is unavailable: {error}", error=UNAVAILABLE)
        content = [TextContent(type="text", text=whole_letters(result.text))]
        meta = {"error": result.error} if result.error else None
        return McpResult(content=content, meta=meta, is_error=result.error is not None)

    server.tool(call, name=name, description=description, output_schema=None)


async def serve(toolbox: Toolbox, *, transport: Transport, host: str = LOOPBACK, port: int = 0) -> None:
    """Serve until the client closes the connection (stdio) or a signal arrives (http), then close every session.

    Port 0 selects a free port. Over HTTP, requests need the token in TOKEN_VARIABLE, else a new one, which is part of
    the address that is printed on stderr. Raises UserError if the address is not available or the token's file cannot
    be read.
    """
    server = build_server(toolbox, transport=transport)
    if transport == "stdio":
        await server.run_stdio_async(show_banner=False, log_level="ERROR")
        return
    configured = find_key(TOKEN_VARIABLE)
    token = configured or new_token()
    with listen(host, port) as listener:
        port = listener.getsockname()[1]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/mcp"
        print(f"serving tools at {url if configured else with_token(url, token)}", file=sys.stderr, flush=True)
        if host not in (LOOPBACK, "::1", "localhost"):
            print(
                f"warning: {host} is reached in clear text, and anyone who reads the token can run code in the "
                "sandbox; put a proxy with TLS in front of it",
                file=sys.stderr,
            )
        # "auto" prevents DNS rebinding: otherwise a web page could reach a loopback server under its own host name.
        await server.run_http_async(
            show_banner=False,
            log_level="ERROR",
            host=host,
            port=port,
            sockets=[listener],
            host_origin_protection="auto",
            middleware=[Middleware(TokenGate, token=token)],
        )
