"""HTTP clients: bounded replies, and for the tools' services an even pace, retries, and no API key in an error."""

import asyncio
import json
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import httpx

from configs.api_keys import on_this_machine
from configs.errors import each_text
from envs.types import ToolUnavailableError

Answer = TypeVar("Answer")

USER_AGENT = "agentflow-ray/0.1"
MAX_REPLY_BYTES = 4 * 2**20


class RequestError(Exception):
    """A request without a usable reply; a `passing` one may succeed later.

    The message holds nothing that the server wrote.
    """

    def __init__(self, problem: str, *, passing: bool = False, status: int | None = None) -> None:
        super().__init__(problem)
        self.passing = passing
        self.status = status


class RefusedError(RequestError):
    """A page or query that cannot be served: an observation for the planner, with the category of its error."""

    def __init__(self, category: str, message: str, *, passing: bool = False) -> None:
        super().__init__(message, passing=passing)
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
    max_bytes: int = MAX_REPLY_BYTES
    """Limit of one reply; of a page, before and after decompression."""


class Attempts:
    """Attempts at an even pace, repeated after a passing failure. Event loops can share an object."""

    def __init__(self, limits: ServiceLimits) -> None:
        self.limits = limits
        self._next_start = 0.0

    async def repeat(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the result of the first successful attempt; raises the last RequestError, or TimeoutError."""
        limits, pause_s = self.limits, self.limits.first_pause_s
        await self._wait_for_turn()
        async with asyncio.timeout(limits.time_limit_s):
            for number in range(1, limits.max_attempts + 1):
                try:
                    return await attempt()
                except RequestError as error:
                    if not error.passing or number == limits.max_attempts:
                        raise
                # Jitter keeps workers that were refused together from returning together.
                await asyncio.sleep(pause_s * random.uniform(1, 1.5))
                pause_s *= 2
                await self._wait_for_turn()
        raise AssertionError("the last attempt returns or raises")

    async def _wait_for_turn(self) -> None:
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 60 / self.limits.requests_per_minute
        if start > now:
            await asyncio.sleep(start - now)


class Service(Attempts):
    """One server that a tool asks; errors call it `name`.

    Args:
        key: The API key, sent as a bearer token and replaced by `[key]` in replies.
        advice: The remedy if it refuses a request.
        takes_queries: Whether status 400 is the fault of the query, and not of the request around it.
    """

    def __init__(
        self,
        name: str,
        base_url: str,
        limits: ServiceLimits,
        *,
        key: str = "",
        advice: str = "",
        takes_queries: bool = False,
    ) -> None:
        super().__init__(limits)
        self._name = name
        self._base_url = base_url
        self._key = key
        self._advice = advice
        self._takes_queries = takes_queries
        self._headers = {"User-Agent": USER_AGENT}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    async def ask(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the result of the first successful attempt.

        Raises RefusedError if the service rejects this query, and ToolUnavailableError after any other failure, also if
        the reply does not follow the service's API.
        """
        try:
            return await self.repeat(attempt)
        except RefusedError:
            raise
        except RequestError as error:
            if self._takes_queries and error.status == 400:
                raise RefusedError("bad_query", f"the service answered with {error}") from None
            refused = error.status is not None and not error.passing
            problem = f"{error}{f'; {self._advice}' if refused and self._advice else ''}"
        except TimeoutError:
            problem = f"no answer within {self.limits.time_limit_s} s"
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
            problem = "a reply that does not follow its API"
        # Not raised inside `except`: the error may quote the reply.
        raise ToolUnavailableError(f"{self._name} failed with {problem}")

    async def send(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: object = None
    ) -> Any:
        """Send one request and return the JSON value of the reply; raises RequestError, ValueError, RecursionError."""
        async with self.client() as client:
            response = await client.request(method, self._base_url + path, params=params, json=body)
        return self.without_key(json.loads(response.content))

    def client(self) -> "ServiceClient":
        """Return a client for one request, so that any event loop can ask."""
        limits = self.limits
        return ServiceClient(
            base_url=self._base_url, timeout=limits.attempt_limit_s, max_bytes=limits.max_bytes, headers=self._headers
        )

    def without_key(self, value: object) -> Any:
        """Redact the key in a parsed JSON value, because JSON can spell a letter in several ways."""
        return each_text(value, lambda text: text.replace(self._key, "[key]")) if self._key else value


class BoundedClient(httpx.AsyncClient):
    """An HTTP client that bounds size and whole time of each reply; httpx's own timeout holds for each read.

    Connections are not kept: several event loops may use one client. No proxy is used for a server on this machine.
    """

    def __init__(self, *, base_url: str, timeout: float, max_bytes: int = MAX_REPLY_BYTES, **options: Any) -> None:
        super().__init__(
            base_url=base_url,
            timeout=timeout,
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=not on_this_machine(base_url),
            verify=tls_context(),
            **options,
        )
        # A compressed reply could be far larger than what is read of it.
        self.headers["Accept-Encoding"] = "identity"
        self._limit_s = timeout
        self._max_bytes = max_bytes

    async def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        """Return the whole reply. Raises httpx.HTTPError."""
        content = bytearray()
        try:
            async with asyncio.timeout(self._limit_s):
                response = await super().send(request, stream=True, **options)
                try:
                    if response.headers.get("Content-Encoding") not in (None, "", "identity"):
                        raise httpx.DecodingError("a compressed reply", request=request)
                    async for chunk in response.aiter_raw():
                        content += chunk
                        if len(content) > self._max_bytes:
                            raise httpx.DecodingError(f"more than {self._max_bytes} bytes", request=request)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise httpx.ReadTimeout(f"no reply within {self._limit_s:g} s", request=request) from None
        headers = [pair for pair in response.headers.multi_items() if pair[0] != "transfer-encoding"]
        return httpx.Response(response.status_code, headers=headers, content=bytes(content), request=request)


class ServiceClient(BoundedClient):
    """A bounded client that raises RequestError for a failed request."""

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Return a whole reply with a status of success."""
        try:
            response = await super().send(request, **options)
        except httpx.TimeoutException:
            failure = RequestError(f"no reply within {self._limit_s:g} s", passing=True)
        except httpx.ConnectError:
            failure = RequestError("no connection", passing=True)
        except httpx.DecodingError as error:
            failure = RequestError(str(error))
        except httpx.HTTPError as error:
            failure = RequestError(f"the connection broke ({type(error).__name__})", passing=True)
        else:
            if response.is_success:
                return response
            status = response.status_code
            failure = RequestError(f"status {status}", passing=is_passing(status), status=status)
        # Not raised inside `except`: the error of httpx holds the request, and the request holds the key.
        raise failure


def is_passing(status: int) -> bool:
    """Return whether the same request may get another status later."""
    return status in (408, 425, 429) or status >= 500


@cache
def tls_context() -> ssl.SSLContext:
    """Return the trusted certificates, loaded once: loading takes longer than many a request."""
    return httpx.create_ssl_context()
