"""The HTTP client of the tools: an even pace, retries, limits of time and size, and no API key in an error."""

import asyncio
import json
import random
import ssl
import time
import zlib
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, TypeVar

import httpx

from configs.api_keys import on_this_machine
from configs.errors import each_text
from envs.types import ToolUnavailableError

Answer = TypeVar("Answer")
Sleep = Callable[[float], Awaitable[object]]

USER_AGENT = "agentflow-ray/0.1"
LONGEST_PAUSE_S = 120.0
_PASSING = (408, 425, 429)
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
_GZIP_MEMBER = b"\x1f\x8b"


class RequestError(Exception):
    """A request without a usable reply. The message holds nothing that the server wrote.

    Attributes:
        passing: Whether the same request may succeed later.
        wait_s: The pause that the server asks for.
        status: The HTTP status, or None without a reply.
        body: The beginning of the server's reply. It is untrusted and never shown.
        attempts: The number of requests that were sent.
    """

    attempts = 1

    def __init__(
        self, problem: str, *, passing: bool = False, wait_s: float = 0.0, status: int | None = None, body: str = ""
    ) -> None:
        super().__init__(problem)
        self.passing = passing
        self.wait_s = wait_s
        self.status = status
        self.body = body


class RefusedError(RequestError):
    """A page or query that cannot be served: an observation for the planner, not a fault of the tool.

    Attributes:
        category: The category of the tool result's error.
    """

    def __init__(self, category: str, message: str, *, passing: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(message, passing=passing, wait_s=wait_s)
        self.category = category


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """The bounds of one question to a service."""

    max_attempts: int = 4
    attempt_limit_s: float = 10.0
    time_limit_s: float = 30.0
    """Covers all attempts and the pauses between them, but not the wait for the first start."""
    first_pause_s: float = 0.5
    requests_per_minute: float = 60.0
    """Shared by all questions to one object."""
    max_bytes: int = 4 * 2**20
    """Limit of one reply, before and after decompression."""


class Attempts:
    """Attempts that start at an even pace and are repeated after a passing failure. Event loops can share an object."""

    def __init__(self, limits: ServiceLimits, *, sleep: Sleep = asyncio.sleep) -> None:
        self.limits = limits
        self._sleep = sleep
        self._next_start = 0.0

    async def ask(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the result of the first successful attempt; raises the RequestError of the last attempt."""
        try:
            async with asyncio.timeout(None) as limit:
                return await self._repeat(attempt, limit)
        except TimeoutError:
            raise RequestError(f"no answer within {self.limits.time_limit_s} s", passing=True) from None

    async def _repeat(self, attempt: Callable[[], Awaitable[Answer]], limit: asyncio.Timeout) -> Answer:
        loop, number, pause_s = asyncio.get_running_loop(), 1, self.limits.first_pause_s
        while True:
            now = time.monotonic()
            start = max(now, self._next_start)
            self._next_start = start + 60 / self.limits.requests_per_minute
            if start > now:
                await self._sleep(start - now)
            if number == 1:
                limit.reschedule(loop.time() + self.limits.time_limit_s)
            try:
                return await attempt()
            except RequestError as error:
                failure = error
            failure.attempts = number
            # Jitter keeps workers that were refused together from returning together.
            wait_s = max(pause_s * random.uniform(1, 1.5), failure.wait_s)
            ends = limit.when()
            assert ends is not None
            again = failure.passing and number < self.limits.max_attempts
            if not again or wait_s > min(LONGEST_PAUSE_S, ends - loop.time()):
                raise failure
            await self._sleep(wait_s)
            number, pause_s = number + 1, min(2 * pause_s, LONGEST_PAUSE_S / 2)


class Service(Attempts):
    """One server that a tool asks.

    Args:
        name: Its name in error messages.
        base_url: Its root address.
        limits: The bounds of one question.
        key: The API key, sent in the header `key_header` and replaced by `[key]` in replies.
        key_header: The header of the key; Authorization carries it as a bearer token.
        sleep: The function that waits.
    """

    def __init__(
        self,
        name: str,
        base_url: str,
        limits: ServiceLimits,
        *,
        key: str = "",
        key_header: str = "Authorization",
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        super().__init__(limits, sleep=sleep)
        self._name = name
        self._base_url = base_url
        self._key = key
        self._headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "gzip"}
        if key:
            self._headers[key_header] = f"Bearer {key}" if key_header == "Authorization" else key

    async def ask(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the result of the first successful attempt.

        Raises:
            RefusedError: If the service rejects this query.
            ToolUnavailableError: After any other failure.
        """
        try:
            return await super().ask(attempt)
        except RefusedError:
            raise
        except RequestError as error:
            times = f" {error.attempts} times, at last" if error.attempts > 1 else ""
            raise ToolUnavailableError(f"{self._name} failed{times} with {error}") from None

    async def send(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: object = None
    ) -> Any:
        """Send one request and return the JSON value of the reply; raises RequestError."""
        async with self.client() as client:
            response = await client.request(method, self._base_url + path, params=params, json=body)
        try:
            return self.without_key(json.loads(response.content))
        except (ValueError, RecursionError):
            raise RequestError(f"status {response.status_code} without JSON", status=response.status_code) from None

    def client(self) -> "BoundedClient":
        """Return a client for one request, so that any event loop can ask the service."""
        return BoundedClient(self.limits, headers=self._headers, use_proxy=not on_this_machine(self._base_url))

    def without_key(self, value: object) -> Any:
        """Redact the key in a parsed JSON value, because JSON can spell a letter in several ways."""
        return each_text(value, lambda text: text.replace(self._key, "[key]")) if self._key else value


class BoundedClient(httpx.AsyncClient):
    """An HTTP client that bounds the time and the size of each reply, and raises RequestError for a failed request.

    A proxy from the environment is used only if `use_proxy` is set: it cannot reach services on this machine.
    """

    def __init__(self, limits: ServiceLimits, *, headers: Mapping[str, str], use_proxy: bool) -> None:
        super().__init__(timeout=limits.attempt_limit_s, verify=tls_context(), headers=headers, trust_env=use_proxy)
        self._limits = limits

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Return a reply with status 200 whose content is read and decompressed."""
        options["stream"] = True
        limit_s, max_bytes = self._limits.attempt_limit_s, self._limits.max_bytes
        status = None
        failure: RequestError
        try:
            # The timeout of httpx is for each read; a server that trickles never exceeds it.
            async with asyncio.timeout(limit_s):
                response = await super().send(request, **options)
                status = response.status_code
                try:
                    coding = response.headers.get("Content-Encoding", "")
                    content, cut = await read_body(response.aiter_raw(), coding, max_bytes)
                finally:
                    await response.aclose()
        except (TimeoutError, httpx.TimeoutException):
            failure = RequestError(f"no reply within {limit_s:g} s", passing=True)
        except httpx.ConnectError:
            failure = RequestError("no connection", passing=True)
        except httpx.RequestError as error:
            failure = RequestError(f"the connection broke ({type(error).__name__})", passing=True)
        except RequestError as error:
            failure = RequestError(f"a reply that cannot be read: {error}", passing=error.passing, status=status)
        else:
            if cut:
                raise RequestError(f"status {status} with more than {max_bytes} bytes", status=status)
            if not response.is_success:
                raise RequestError(
                    f"status {status}",
                    passing=is_passing(response.status_code),
                    wait_s=retry_after_s(response.headers.get("Retry-After", "")),
                    status=status,
                    body=content[:2000].decode(errors="replace"),
                )
            return httpx.Response(response.status_code, content=content, request=request)
        # Not raised inside `except`: the error of httpx holds the request, and the request holds the key.
        raise failure


class _Unpacker:
    """Decompress gzip of one or several members, and deflate with or without zlib's header."""

    def __init__(self, coding: str) -> None:
        self._may_be_bare = coding == "deflate"
        self._first = b""
        self._stream = zlib.decompressobj(_GZIP_OR_ZLIB)

    def unpack(self, chunk: bytes, at_most: int) -> bytes:
        """Return the decompressed bytes; data after the last member is ignored. Raises zlib.error."""
        part = self._first_bytes(chunk, at_most) if self._may_be_bare else self._stream.decompress(chunk, at_most)
        while self._stream.unused_data.startswith(_GZIP_MEMBER) and len(part) < at_most:
            rest, self._stream = self._stream.unused_data, zlib.decompressobj(_GZIP_OR_ZLIB)
            part += self._stream.decompress(rest, at_most - len(part))
        return part

    @property
    def at_end(self) -> bool:
        """True if the last member is complete."""
        return self._stream.eof

    def _first_bytes(self, chunk: bytes, at_most: int) -> bytes:
        # Two bytes show whether zlib's header is there.
        self._first += chunk
        self._may_be_bare = len(self._first) < 2
        try:
            return self._stream.decompress(chunk, at_most)
        except zlib.error:
            self._stream = zlib.decompressobj(-zlib.MAX_WBITS)
            return self._stream.decompress(self._first, at_most)


async def read_body(chunks: AsyncIterable[bytes], coding: str, max_bytes: int) -> tuple[bytes, bool]:
    """Return the decompressed body, and whether it was cut at `max_bytes`.

    No more than `max_bytes` are held in memory, however much the server sends and whatever it decompresses to.

    Raises:
        RequestError: If it cannot be decompressed; passing if the connection broke off.
    """
    if coding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise RequestError("it is compressed in a way that is not supported")
    unpacker = _Unpacker(coding) if coding not in ("", "identity") else None
    body = bytearray()
    num_read = 0
    async for chunk in chunks:
        num_read += len(chunk)
        try:
            body += unpacker.unpack(chunk, max_bytes + 1 - len(body)) if unpacker else chunk
        except zlib.error:
            raise RequestError("its compression is broken") from None
        # Count the compressed bytes too: an endless stream can decompress to nothing.
        if max(len(body), num_read) > max_bytes:
            return bytes(body[:max_bytes]), True
    if unpacker and num_read and not unpacker.at_end:
        raise RequestError("the connection broke within a compressed reply", passing=True)
    return bytes(body), False


def is_passing(status: int) -> bool:
    """Return whether the same request may get another status later."""
    return status in _PASSING or status >= 500


def retry_after_s(header: str) -> float:
    """Return the pause that a Retry-After header asks for, in seconds or as a date; 0 for an unusable one."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return 0.0


@cache
def tls_context() -> ssl.SSLContext:
    """Return the trusted certificates, loaded once: loading takes longer than many a request."""
    return httpx.create_ssl_context()
