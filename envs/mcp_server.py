"""The switched-on tools as an MCP server: stdio for one client, HTTP for many, with a code REPL for each session.

A session is one `Toolbox.episode`, so no two sessions share names, files or searches. Which session a call belongs to:
the one whose id it names (from `open_session`), else that of its connection; a request without either, which the
newest protocol allows, has a session of its own that ends with it.
"""

import contextlib
import secrets
import socket
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from starlette.middleware import Middleware

from configs.api_keys import find_key
from envs.mcp_sessions import ServerRefusedError, Sessions
from envs.token_gate import TokenGate, new_token, with_token
from envs.tools.mcp_client import UNAVAILABLE
from envs.tools.plain import AnswerTool, ThinkTool
from envs.tools.toolbox import Toolbox
from envs.types import ToolResult, ToolUnavailableError

if TYPE_CHECKING:
    from fastmcp import Context, FastMCP
    from fastmcp.tools.base import ToolResult as McpResult

Transport = Literal["stdio", "http"]

LOOPBACK = "127.0.0.1"
MAX_INPUT_CHARS = 100_000
TOKEN_VARIABLE = "AGENTFLOW_TOOLS_TOKEN"
"""Holds the token of the server over HTTP; where it is unset, every start has another one."""

NO_SESSION = "no-session"

_PLANNERS_OWN = (ThinkTool, AnswerTool)
_STDIO_SESSION = "stdio"


def build_server(toolbox: Toolbox, *, transport: Transport, sessions: Sessions | None = None) -> "FastMCP":
    """A FastMCP server that offers the toolbox's tools, but not the planner's own moves (`think`, `answer`).

    Every failure is a result with `isError` and its category in `_meta.error`; UNAVAILABLE is the one that the caller's
    input did not cause. The toolbox stays the caller's to close.
    """
    from fastmcp import FastMCP

    own = Sessions(toolbox) if sessions is None else sessions

    @contextlib.asynccontextmanager
    async def lifespan(server: Any) -> AsyncIterator[None]:
        try:
            yield
        finally:
            own.close_all()

    server = FastMCP("agentflow-tools", lifespan=lifespan)
    with toolbox.episode() as tools:
        for tool in tools:
            if not isinstance(tool, _PLANNERS_OWN):
                _offer(server, own, tool.name, tool.description, transport)
    _offer_sessions(server, own)
    return server


def _offer(server: "FastMCP", sessions: Sessions, name: str, description: str, transport: Transport) -> None:
    from fastmcp.server.dependencies import get_context
    from fastmcp.tools.base import ToolResult as McpResult

    async def call(
        input: Annotated[str, Field(max_length=MAX_INPUT_CHARS, description="what the tool is given, as plain text")],
        session: Annotated[str, Field(description="an id from open_session; empty: the connection's own")] = "",
    ) -> McpResult:
        if session and not sessions.holds(session):
            text = "No such session: it was never opened, or was idle for too long. Call open_session."
            return _mcp_result(ToolResult(text=text, error=NO_SESSION))
        try:
            own = session or _connection_session(get_context(), transport)
            with sessions.lent(own, owner=_client(get_context())) as tools:
                return _mcp_result(await tools[name].call(input))
        except (ToolUnavailableError, ServerRefusedError) as error:
            return _mcp_result(ToolResult(text=f"The tool is unavailable: {error}", error=UNAVAILABLE))

    server.tool(call, name=name, description=description, output_schema=None)


def _offer_sessions(server: "FastMCP", sessions: Sessions) -> None:
    from fastmcp.server.dependencies import get_context
    from fastmcp.tools.base import ToolResult as McpResult

    async def open_session() -> McpResult:
        session_id = secrets.token_hex(16)
        try:
            sessions.open(session_id, owner=_client(get_context()))
        except ServerRefusedError as error:
            return _mcp_result(ToolResult(text=str(error), error=UNAVAILABLE))
        return _mcp_result(ToolResult(text=session_id))

    async def close_session(session: str) -> McpResult:
        if sessions.close(session):
            return _mcp_result(ToolResult(text="Closed."))
        return _mcp_result(ToolResult(text="No such session.", error=NO_SESSION))

    opens = "open a session and get its id; calls that name it share variables and files, and nobody else's"
    server.tool(open_session, description=opens, output_schema=None)
    server.tool(close_session, description="end a session that open_session opened", output_schema=None)


def _mcp_result(result: ToolResult) -> "McpResult":
    from fastmcp.tools.base import ToolResult as McpResult
    from mcp.types import TextContent

    meta = {"error": result.error} if result.error else None
    text = result.text.encode(errors="replace").decode()  # JSON has no half of a surrogate pair
    return McpResult(content=[TextContent(type="text", text=text)], meta=meta, is_error=result.error is not None)


def _connection_session(context: "Context", transport: Transport) -> str | None:
    """The id of the session that the connection stands for; None for a request that stands alone."""
    if transport == "stdio":
        return _STDIO_SESSION
    header = _header(context)
    return f"connection {header}" if header else None


def _client(context: "Context") -> str:
    """Who asks: a connection, or the machine that a request without one comes from."""
    request = context.request_context.request if context.request_context else None
    machine = request.client.host if request and request.client else ""
    return _header(context) or machine


def _header(context: "Context") -> str:
    request = context.request_context.request if context.request_context else None
    return request.headers.get("mcp-session-id") or "" if request else ""


async def serve(toolbox: Toolbox, *, transport: Transport, host: str = LOOPBACK, port: int = 0) -> None:
    """Serve until the client hangs up (stdio) or a signal comes (http), then close every session.

    With `port` 0 the system chooses one. Over http only who has the token is answered: that of TOKEN_VARIABLE, else a
    new one, which then stands in the address that is printed on stderr. Raises ServerRefusedError when the address
    cannot be bound, and ApiKeyError.
    """
    server = build_server(toolbox, transport=transport)
    if transport == "stdio":
        await server.run_stdio_async(show_banner=False, log_level="ERROR")
        return
    given = find_key(TOKEN_VARIABLE)
    token = given or new_token()
    with _bound_socket(host, port) as listener:
        _announce(host, listener.getsockname()[1], None if given else token)
        # "auto": off by default, and without it any web page could reach a loopback server under a name of its own.
        await server.run_http_async(
            show_banner=False,
            log_level="ERROR",
            host=host,
            port=listener.getsockname()[1],
            sockets=[listener],
            host_origin_protection="auto",
            middleware=[Middleware(TokenGate, token=token)],
        )


def _bound_socket(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ServerRefusedError(
            f"cannot listen on {host} port {port}: {reason}; choose another --host or --port"
        ) from None


def _announce(host: str, port: int, new_token: str | None) -> None:
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/mcp"
    print(f"serving tools at {with_token(url, new_token) if new_token else url}", file=sys.stderr, flush=True)
    if host not in (LOOPBACK, "::1", "localhost"):
        print(
            f"warning: {host} is reached in clear text, and whoever reads the token there can run code in the sandbox; "
            "put a proxy with TLS before it",
            file=sys.stderr,
        )
