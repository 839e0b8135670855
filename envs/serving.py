"""What servers of ours share: the socket that they listen at, and who may ask them over HTTP: whoever has the token,
and no page of another origin."""

import json
import secrets
import socket
from urllib.parse import parse_qs, urlencode

from starlette.types import ASGIApp, Receive, Scope, Send

from configs.errors import UserError

LOOPBACK = "127.0.0.1"


class UserError(UserError):
    """Nothing can listen at an address."""


def listen(host: str, port: int) -> socket.socket:
    """At this address; port 0 is any that is free. Raises UserError where it cannot be had.

    What its connections are given to send leaves at once. asyncio asks for that only where a socket says that it is
    TCP's, which one of the standard library does not; without it the second part of a reply waits for the client's
    acknowledgement of the first, 40 ms on Linux.
    """
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen on {host} port {port}: {reason}; choose another --port, 0 for any") from None
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


PARAMETER = "token"


def new_token() -> str:
    """192 random bits as 32 characters that need no quoting in a URL."""
    return secrets.token_urlsafe(24)


def with_token(url: str, token: str) -> str:
    """The URL with which a browser or a client is let in."""
    return f"{url}?{urlencode({PARAMETER: token})}"


class TokenGate:
    """ASGI middleware that answers only requests with the token, as `?token=...` or as `Authorization: Bearer ...`.

    Paths below one of `open_paths` need none. A request that a browser sends for a page of another origin, be it
    another port of this machine, is refused whatever it has.
    """

    def __init__(self, app: ASGIApp, *, token: str, open_paths: tuple[str, ...] = ()) -> None:
        self._app = app
        self._token = token.encode()
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif _is_foreign(scope):
            await _refuse(send, 403, "this server answers no page of another origin")
        elif scope["path"].startswith(self._open_paths) or self._has_token(scope):
            await self._app(scope, receive, send)
        else:
            says = f"this server needs its token: use the address that it printed, which ends in ?{PARAMETER}=..."
            await _refuse(send, 401, says)

    def _has_token(self, scope: Scope) -> bool:
        asked = parse_qs(scope["query_string"].decode("latin-1"))
        shown = [value.encode(errors="replace") for value in asked.get(PARAMETER, [])]
        shown += [value[7:] for value in _headers(scope, b"authorization") if value[:7].lower() == b"bearer "]
        return any(secrets.compare_digest(one, self._token) for one in shown)


def _is_foreign(scope: Scope) -> bool:
    own = [scope["scheme"].encode() + b"://" + host for host in _headers(scope, b"host")]
    return any(origin not in own for origin in _headers(scope, b"origin"))


def _headers(scope: Scope, wanted: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == wanted]


async def _refuse(send: Send, status: int, says: str) -> None:
    body = json.dumps({"error": says}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
