"""The switched-on tools as an MCP server: stdio for one client, HTTP for many, with a code REPL for each session."""

import contextlib
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Literal

from fastmcp import Context, FastMCP
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
"""Holds the token of the server over HTTP; where it is unset, every start has another one."""
MAX_INPUT_CHARS = 100_000
NO_SESSION = "no-session"
MAX_SESSIONS = 64
IDLE_S = 900.0
"""A session that nobody used for so long is closed when room for another one is needed."""


class ServerRefusedError(UserError):
    """The server cannot be started or a session cannot be opened; the message says why and what to do."""


@dataclass(slots=True)
class _Session:
    """Tools of one session, which `owner` opened; `num_calls` are in the middle of being answered."""

    tools: dict[str, Tool]
    episode: AbstractContextManager[list[Tool]]
    owner: str
    last_used: float = field(default_factory=time.monotonic)
    num_calls: int = 0


class Sessions:
    """The open sessions by their id, at most `max_sessions`.

    One client may have them all while it is alone. When there is no room, the client with the most gives up the session
    that it has not used for longest, to one that would still have fewer; a session in the middle of a call stays.
    """

    def __init__(self, toolbox: Toolbox, *, max_sessions: int = MAX_SESSIONS, idle_s: float = IDLE_S) -> None:
        self._toolbox = toolbox
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._open: dict[str, _Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, session_id: str, *, owner: str = "") -> None:
        """Raises ServerRefusedError when all places are taken, and none by a client that must give one up."""
        self._close_idle()
        if len(self._open) >= self._max_sessions and not self._close_of_greediest(owner):
            raise ServerRefusedError(
                f"all {self._max_sessions} sessions are in use; close one, or wait {self._idle_s:.0f} s of idleness"
            )
        episode = self._toolbox.episode()
        self._open[session_id] = _Session({tool.name: tool for tool in episode.__enter__()}, episode, owner)

    def close(self, session_id: str) -> bool:
        """End a session and whatever runs in it; False where there is none of this id."""
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
        """The tools of a session, which is opened for `owner` where it is new; None: of one that ends with this call,
        and counts for nobody. While they are lent the session is not idle. Raises ServerRefusedError as `open` does."""
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

    def _close_of_greediest(self, newcomer: str) -> bool:
        """Make room at the cost of the client with the most sessions; False where `newcomer` would have as many."""
        num_of = Counter(session.owner for session in self._open.values())
        greedy = {owner for owner, num in num_of.items() if num > num_of[newcomer] + 1}
        at_rest = [
            (-num_of[session.owner], session.last_used, session_id)
            for session_id, session in self._open.items()
            if session.owner in greedy and session.num_calls == 0
        ]
        return bool(at_rest) and self.close(min(at_rest)[2])


def build_server(toolbox: Toolbox, *, transport: Transport, sessions: Sessions | None = None) -> FastMCP:
    """A FastMCP server that offers the toolbox's tools, but not the planner's own moves (`think`, `answer`).

    Every failure is a result with `isError` and its category in `_meta.error`; UNAVAILABLE is the one that the caller's
    input did not cause. The toolbox stays the caller's to close.
    """
    own = Sessions(toolbox) if sessions is None else sessions

    @contextlib.asynccontextmanager
    async def lifespan(server: object) -> AsyncIterator[None]:
        try:
            yield
        finally:
            own.close_all()

    server = FastMCP("agentflow-tools", lifespan=lifespan)
    with toolbox.episode() as tools:
        for tool in tools:
            if not isinstance(tool, ThinkTool | AnswerTool):
                _offer(server, own, tool.name, tool.description, transport)
    _offer_sessions(server, own)
    return server


def _offer(server: FastMCP, sessions: Sessions, name: str, description: str, transport: Transport) -> None:
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


def _offer_sessions(server: FastMCP, sessions: Sessions) -> None:
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


def _mcp_result(result: ToolResult) -> McpResult:
    meta = {"error": result.error} if result.error else None
    content = [TextContent(type="text", text=whole_letters(result.text))]
    return McpResult(content=content, meta=meta, is_error=result.error is not None)


def _connection_session(context: Context, transport: Transport) -> str | None:
    """The id of the session that the connection stands for; None for a request that stands alone."""
    if transport == "stdio":
        return "stdio"
    header = _header(context)
    return _session_of(header) if header else None


def _session_of(connection: str) -> str:
    return f"connection {connection}"


class ConnectionEnd:
    """ASGI middleware: a client that hangs up ends the session that its connection stood for. That of one that breaks
    off without a word ends when it was idle for long."""

    def __init__(self, app: ASGIApp, *, sessions: Sessions) -> None:
        self._app = app
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
        if scope["type"] == "http" and scope["method"] == "DELETE":
            self._sessions.close(_session_of(Headers(scope=scope).get("mcp-session-id", "")))


def _client(context: Context) -> str:
    """Who asks: a connection, or the machine that a request without one comes from."""
    request = context.request_context.request if context.request_context else None
    machine = request.client.host if request and request.client else ""
    return _header(context) or machine


def _header(context: Context) -> str:
    request = context.request_context.request if context.request_context else None
    return request.headers.get("mcp-session-id") or "" if request else ""


async def serve(toolbox: Toolbox, *, transport: Transport, host: str = LOOPBACK, port: int = 0) -> None:
    """Serve until the client hangs up (stdio) or a signal comes (http), then close every session.

    With `port` 0 the system chooses one. Over http only who has the token is answered: that of TOKEN_VARIABLE, else a
    new one, which then stands in the address that is printed on stderr. Raises UserError when the address
    cannot be had, and ApiKeyError.
    """
    sessions = Sessions(toolbox)
    server = build_server(toolbox, transport=transport, sessions=sessions)
    if transport == "stdio":
        await server.run_stdio_async(show_banner=False, log_level="ERROR")
        return
    given = find_key(TOKEN_VARIABLE)
    token = given or new_token()
    with listen(host, port) as listener:
        _announce(host, listener.getsockname()[1], None if given else token)
        # "auto": off by default, and without it any web page could reach a loopback server under a name of its own.
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
            f"warning: {host} is reached in clear text, and whoever reads the token there can run code in the sandbox; "
            "put a proxy with TLS before it",
            file=sys.stderr,
        )
