"""Helpers shared by the HTTP servers: binding a socket, and bearer-token authentication."""

import secrets
import socket
from urllib.parse import urlencode

from starlette.datastructures import Headers, QueryParams
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from configs.errors import UserError

LOOPBACK = "127.0.0.1"
PARAMETER = "token"


def listen(port: int) -> socket.socket:
    """Return a socket that listens on the loopback address; port 0 is any free one.

    Raises UserError if the port is not available.
    """
    try:
        listener = socket.create_server((LOOPBACK, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen on port {port}: {reason}; choose another --port, 0 for any") from None
    # asyncio sets it only for sockets created with an explicit protocol. Without it the second part of a reply waits
    # for the client's acknowledgement of the first, 40 ms on Linux.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def new_token() -> str:
    """Return 192 random bits as 32 characters that need no quoting in a URL."""
    return secrets.token_urlsafe(24)


def with_token(url: str, token: str) -> str:
    """Return the URL with its token, for a browser or a client."""
    return f"{url}?{urlencode({PARAMETER: token})}"


class TokenGate:
    """ASGI middleware that answers only requests with the token, as `?token=...` or as `Authorization: Bearer ...`.

    Paths that start with one of `open_paths` need none. A request that a browser sends for a page of another origin,
    including another port of this machine, is refused even with the token.
    """

    def __init__(self, app: ASGIApp, *, token: str, open_paths: tuple[str, ...] = ()) -> None:
        self._app = app
        self._token = token.encode()
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        tokens = QueryParams(scope["query_string"]).getlist(PARAMETER)
        tokens += [value[7:] for value in headers.getlist("authorization") if value[:7].lower() == "bearer "]
        has_token = any(secrets.compare_digest(token.encode(errors="replace"), self._token) for token in tokens)
        own = [f"{scope['scheme']}://{host}" for host in headers.getlist("host")]
        if any(origin not in own for origin in headers.getlist("origin")):
            answer: ASGIApp = JSONResponse({"error": "this server answers no page of another origin"}, 403)
        elif has_token or scope["path"].startswith(self._open_paths):
            answer = self._app
        else:
            address = f"use the address that it printed, which ends in ?{PARAMETER}=..."
            answer = JSONResponse({"error": f"this server needs its token: {address}"}, 401)
        await answer(scope, receive, send)
