"""The switched-on tools as an MCP server: stdio for one client, HTTP for many, each session with its own state."""

import contextlib
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Literal

from fastmcp import FastMCP
from fastmcp.server.dependencies import get_context
from fastmcp.tools.base import ToolResult as McpResult
from mcp.types import TextContent
from pydantic import Field
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from configs.api_keys import find_key
from configs.errors import UserError, whole_letters
from envs.serving import LOOPBACK, TokenGate, listen, new_token, with_token
from envs.tools.actions import AnswerTool, ThinkTool
from envs.tools.mcp import UNAVAILABLE
from envs.tools.toolbox import Toolbox
from envs.types import Tool, ToolResult, ToolUnavailableError

Transport = Literal["stdio", "http"]

TOKEN_VARIABLE = "AGENTFLOW_TOOLS_TOKEN"
"""Holds the token of the HTTP server; if it is unset, each start makes a new one."""
MAX_INPUT_CHARS = 100_000
NO_SESSION = "no-session"
MAX_SESSIONS = 64
IDLE_S = 900.0
"""A session that is unused for this time is closed when another one needs its place."""


@dataclass(slots=True)
class _Session:
    tools: dict[str, Tool]
    episode: AbstractContextManager[list[Tool]]
    owner: str
    """The client that opened it."""
    last_used: float = field(default_factory=time.monotonic)
    num_calls: int = 0
    """Calls that are running."""


class Sessions:
    """The open sessions by id, at most `max_sessions`.

    A single client may use all of them. If there is no free place, the client with the most sessions loses the one
    that it has not used for the longest time, to a client that then still has fewer. Sessions with running calls stay.
    """

    def __init__(self, toolbox: Toolbox, *, max_sessions: int = MAX_SESSIONS, idle_s: float = IDLE_S) -> None:
        self._toolbox = toolbox
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._open: dict[str, _Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, session_id: str, *, owner: str = "") -> None:
        """Open a session; raises UserError if all places are in use and no client has to give one up."""
        self._close_idle()
        if len(self._open) >= self._max_sessions and not self._close_of_largest_owner(owner):
            raise UserError(
                f"all {self._max_sessions} sessions are in use; close one, or wait {self._idle_s:.0f} s of idleness"
            )
        episode = self._toolbox.episode()
        self._open[session_id] = _Session({tool.name: tool for tool in episode.__enter__()}, episode, owner)

    def close(self, session_id: str) -> bool:
        """End a session and its running calls; return False if there is none of this id."""
        session = self._open.pop(session_id, None)
        if session is not None:
            session.episode.__exit__(None, None, None)
        return session is not None

    def close_all(self) -> None:
        for session_id in list(self._open):
            self.close(session_id)

    def holds(self, session_id: str) -> bool:
        return session_id in self._open

    @contextmanager
    def lent(self, session_id: str | None, *, owner: str = "") -> Iterator[dict[str, Tool]]:
        """Lend the tools of a session for one call. A new session is opened for `owner`, see `open`.

        Without an id, the session ends with this call and counts for no client.
        """
        if session_id is None:
            session_id = secrets.token_hex(16)
            try:
                with self.lent(session_id, owner=session_id) as tools:
                    yield tools
            finally:
                self.close(session_id)
            return
        if session_id not in self._open:
            self.open(session_id, owner=owner)
        session = self._open[session_id]
        session.num_calls += 1
        try:
            yield session.tools
        finally:
            session.num_calls -= 1
            session.last_used = time.monotonic()

    def _close_idle(self) -> None:
        oldest = time.monotonic() - self._idle_s
        for session_id, session in list(self._open.items()):
            if session.num_calls == 0 and session.last_used < oldest:
                self.close(session_id)

    def _close_of_largest_owner(self, newcomer: str) -> bool:
        """Close a session of a client with the most; return False if `newcomer` would then have as many."""
        num_of = Counter(session.owner for session in self._open.values())
        larger = {owner for owner, num in num_of.items() if num > num_of[newcomer] + 1}
        candidates = [
            (-num_of[session.owner], session.last_used, session_id)
            for session_id, session in self._open.items()
            if session.owner in larger and session.num_calls == 0
        ]
        return bool(candidates) and self.close(min(candidates)[2])


def build_server(toolbox: Toolbox, *, transport: Transport, sessions: Sessions | None = None) -> FastMCP:
    """Return a FastMCP server that offers the toolbox's tools, except the planner's own moves `think` and `answer`.

    Every failure is a result with `isError` and its category in `_meta.error`; the category UNAVAILABLE is a fault that
    the caller's input did not cause. The caller closes the toolbox.
    """
    all_sessions = Sessions(toolbox) if sessions is None else sessions

    @contextlib.asynccontextmanager
    async def lifespan(server: object) -> AsyncIterator[None]:
        try:
            yield
        finally:
            all_sessions.close_all()

    server = FastMCP("agentflow-tools", lifespan=lifespan)
    with toolbox.episode() as tools:
        for tool in tools:
            if not isinstance(tool, ThinkTool | AnswerTool):
                _offer(server, all_sessions, tool.name, tool.description, transport)
    _offer_sessions(server, all_sessions, transport)
    return server


def _offer(server: FastMCP, sessions: Sessions, name: str, description: str, transport: Transport) -> None:
    async def call(
        input: Annotated[str, Field(max_length=MAX_INPUT_CHARS, description="the input of the tool, as plain text")],
        session: Annotated[str, Field(description="an id from open_session; empty: the connection's own")] = "",
    ) -> McpResult:
        if session and not sessions.holds(session):
            text = "No such session: it was never opened, or was idle for too long. Call open_session."
            return _mcp_result(ToolResult(text=text, error=NO_SESSION))
        try:
            own_session, client = _caller(transport)
            with sessions.lent(session or own_session, owner=client) as tools:
                return _mcp_result(await tools[name].call(input))
        except (ToolUnavailableError, UserError) as error:
            return _mcp_result(ToolResult(text=f"The tool is unavailable: {error}", error=UNAVAILABLE))

    server.tool(call, name=name, description=description, output_schema=None)


def _offer_sessions(server: FastMCP, sessions: Sessions, transport: Transport) -> None:
    async def open_session() -> McpResult:
        session_id = secrets.token_hex(16)
        try:
            sessions.open(session_id, owner=_caller(transport)[1])
        except UserError as error:
            return _mcp_result(ToolResult(text=str(error), error=UNAVAILABLE))
        return _mcp_result(ToolResult(text=session_id))

    async def close_session(session: str) -> McpResult:
        if sessions.close(session):
            return _mcp_result(ToolResult(text="Closed."))
        return _mcp_result(ToolResult(text="No such session.", error=NO_SESSION))

    description = "open a session and get its id; calls that name it share variables and files, and no other call's"
    server.tool(open_session, description=description, output_schema=None)
    server.tool(close_session, description="end a session that open_session opened", output_schema=None)


def _mcp_result(result: ToolResult) -> McpResult:
    meta = {"error": result.error} if result.error else None
    content = [TextContent(type="text", text=whole_letters(result.text))]
    return McpResult(content=content, meta=meta, is_error=result.error is not None)


def _caller(transport: Transport) -> tuple[str | None, str]:
    """Return the session id of the caller's connection, or None without a connection, and the name of the client."""
    context = get_context()
    request = context.request_context.request if context.request_context else None
    connection = (request.headers.get("mcp-session-id") or "") if request else ""
    machine = request.client.host if request and request.client else ""
    session = "stdio" if transport == "stdio" else _session_of(connection) if connection else None
    return session, connection or machine


def _session_of(connection: str) -> str:
    return f"connection {connection}"


class ConnectionEnd:
    """ASGI middleware that ends the session of a connection when its client closes it.

    The session of a client that disappears without closing ends after it was idle.
    """

    def __init__(self, app: ASGIApp, *, sessions: Sessions) -> None:
        self._app = app
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
        if scope["type"] == "http" and scope["method"] == "DELETE":
            self._sessions.close(_session_of(Headers(scope=scope).get("mcp-session-id", "")))


async def serve(toolbox: Toolbox, *, transport: Transport, host: str = LOOPBACK, port: int = 0) -> None:
    """Serve until the client closes the connection (stdio) or a signal arrives (http), then close every session.

    Port 0 selects a free port. Over HTTP, requests need the token in TOKEN_VARIABLE, else a new one, which is part of
    the address that is printed on stderr.

    Raises:
        UserError: If the address is not available or the token's file cannot be read.
    """
    sessions = Sessions(toolbox)
    server = build_server(toolbox, transport=transport, sessions=sessions)
    if transport == "stdio":
        await server.run_stdio_async(show_banner=False, log_level="ERROR")
        return
    configured = find_key(TOKEN_VARIABLE)
    token = configured or new_token()
    with listen(host, port) as listener:
        _announce(host, listener.getsockname()[1], None if configured else token)
        # "auto" prevents DNS rebinding: otherwise a web page could reach a loopback server under its own host name.
        await server.run_http_async(
            show_banner=False,
            log_level="ERROR",
            host=host,
            port=listener.getsockname()[1],
            sockets=[listener],
            host_origin_protection="auto",
            middleware=[Middleware(TokenGate, token=token), Middleware(ConnectionEnd, sessions=sessions)],
        )


def _announce(host: str, port: int, new_token: str | None) -> None:
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/mcp"
    print(f"serving tools at {with_token(url, new_token) if new_token else url}", file=sys.stderr, flush=True)
    if host not in (LOOPBACK, "::1", "localhost"):
        print(
            f"warning: {host} is reached in clear text, and anyone who reads the token can run code in the sandbox; "
            "put a proxy with TLS in front of it",
            file=sys.stderr,
        )
