"""JSON over HTTP to a server of chat models: retries, limits, and errors that say what to do."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from configs.api_keys import ApiKeyError, find_key, how_to_set
from configs.backend import BackendConfig
from rollout.engine import BackendError, ContextFullError, EngineError
from rollout.types import Message

MAX_REPLY_BYTES = 4 * 2**20
MAX_QUOTED_CHARS = 200
FIRST_PAUSE_S = 0.5

_PASSING = (408, 425, 429, 500, 502, 503, 504)
_CONTEXT_FULL = re.compile(r"context[ _](length|size|window)|exceeds? the available context", re.IGNORECASE)
_CONTROL = re.compile(r"<(?=\||/?(?:s|think|start_of_turn|end_of_turn)>)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """An attempt without a reply. `status` is None where no response came."""

    problem: str
    status: int | None = None
    passing: bool = False
    unreachable: bool = False


class ChatServer:
    """One server. Every request has a connection of its own, so that it serves any event loop."""

    def __init__(self, config: BackendConfig, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self.url = config.url
        self._config = config
        self._first_pause_s = first_pause_s
        self._key = _key(config.api_key_env)
        self._tls = httpx.create_ssl_context()

    async def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that the server answers with.

        Raises BackendError when it is not there or refuses what every request needs, ContextFullError when the
        messages are too long for the model, EngineError for anything else, retries included.
        """
        pause_s, retries_left = self._first_pause_s, self._config.max_retries
        while True:
            outcome = await self._attempt(method, path, body)
            if isinstance(outcome, dict):
                return outcome
            if not (outcome.passing and retries_left):
                raise self._error(outcome)
            retries_left -= 1
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def upload(self, path: str, file: Path) -> None:
        """A file of any size, as it stands, unless the server has what is at `path` already. Raises BackendError."""
        try:
            # The limit is httpx's own here, for each read and write: how long a whole file takes, nobody knows.
            async with httpx.AsyncClient(
                timeout=self._config.request_timeout_s, verify=self._tls, headers=self._headers()
            ) as http:
                if (await http.head(f"{self.url}{path}")).status_code == 200:
                    return
                response = await http.post(f"{self.url}{path}", content=_parts(file))
            problem = "" if response.is_success else f"status {response.status_code} ({_words(response.content)})"
        except httpx.RequestError as error:
            problem = f"the connection broke ({type(error).__name__})"
        if problem:
            raise BackendError(f"{self.url}: {file.name} was not taken: {problem}; check that the server runs")

    def _headers(self) -> dict[str, str] | None:
        return {"Authorization": f"Bearer {self._key}"} if self._key else None

    async def _attempt(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any] | _Failure:
        limit_s = self._config.request_timeout_s
        try:
            async with (
                asyncio.timeout(limit_s),
                # No limit of httpx's own: it bounds each read, and a server that trickles would never meet it.
                httpx.AsyncClient(timeout=None, verify=self._tls, headers=self._headers()) as http,
                http.stream(method, f"{self.url}{path}", json=body) as response,
            ):
                return _read(response.status_code, await _content(response))
        except TimeoutError:
            return _Failure(problem=f"no reply within {limit_s:g} s; raise backend.request_timeout_s", passing=True)
        except httpx.ConnectError:
            return _Failure(problem="no connection", passing=True, unreachable=True)
        except httpx.RequestError as error:
            return _Failure(problem=f"the connection broke ({type(error).__name__})", passing=True)

    def _error(self, failure: _Failure) -> RuntimeError:
        """What to raise. Not in an `except`: the HTTP client's error holds the request, and that the key."""
        problem = failure.problem.replace(self._key, "[key]") if self._key else failure.problem
        said = f"{self.url}: {problem}"
        if failure.unreachable:
            return BackendError(f"{said}; start the server, or set backend.base_url to where it listens")
        if failure.status in (401, 403):
            return BackendError(f"{said}; set a valid key in the variable that backend.api_key_env names")
        if failure.status == 404:
            return BackendError(f"{said}; check backend.model ('{self._config.model}') and backend.base_url")
        if failure.status in (400, 413, 500) and _CONTEXT_FULL.search(problem):
            return ContextFullError(said)
        if failure.status in (400, 413, 422):
            return BackendError(f"{said}; the server does not take this request: check backend.kind and backend.form")
        logging.getLogger(__name__).warning("%s", said)
        return EngineError(said)


def chat_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """As a server takes them. It reads control tokens wherever they stand, so what only looks like one (`<|im_end|>`
    in a tool result) is written with a space: no text can forge a role. Raises EngineError when there are none."""
    if not messages:
        raise EngineError("this module asks with token ids, and a server takes messages only")
    return [{"role": message.role, "content": _CONTROL.sub("< ", message.content)} for message in messages]


def count_of(reply: Mapping[str, Any], name: str) -> int:
    """A token count of a reply; 0 where the server tells none."""
    value = reply.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


async def _parts(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as stream:
        while part := stream.read(2**20):
            yield part


async def _content(response: httpx.Response) -> bytes:
    content = b""
    async for part in response.aiter_bytes():
        content += part
        if len(content) > MAX_REPLY_BYTES:
            break
    return content


def _read(status: int, content: bytes) -> dict[str, Any] | _Failure:
    if len(content) > MAX_REPLY_BYTES:
        return _Failure(problem=f"status {status} with more than {MAX_REPLY_BYTES} bytes", status=status)
    if status != 200:
        return _Failure(problem=f"status {status} ({_words(content)})", status=status, passing=_passes(status, content))
    try:
        reply = json.loads(content)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        return _Failure(problem="status 200 without a JSON object", status=status, passing=True)
    return reply


def _passes(status: int, content: bytes) -> bool:
    return status in _PASSING and not _CONTEXT_FULL.search(_words(content))


def _words(content: bytes) -> str:
    """The server's own, from `{"error": "..."}` or `{"error": {"message": "..."}}` or as they stand."""
    text = content.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, RecursionError, LookupError, TypeError):
        pass
    return " ".join(text.split())[:MAX_QUOTED_CHARS] or "no words"


def _key(variable: str | None) -> str:
    if variable is None:
        return ""
    try:
        key = find_key(variable)
    except ApiKeyError as error:
        raise BackendError(f"backend.api_key_env: {error}") from None
    if key is None:
        raise BackendError(f"backend.api_key_env needs {variable}: {how_to_set(variable)}, or leave it out")
    return key
