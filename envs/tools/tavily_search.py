"""Web search through Tavily."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
from tavily import AsyncTavilyClient
from tavily import errors as tavily_errors

from envs.tools.found_pages import FoundPage
from envs.tools.http_json import tls_context
from envs.tools.keys import read_key
from envs.tools.service import Failure, Service, ServiceLimits

API_KEY_VARIABLE = "TAVILY_API_KEY"
DEFAULT_URL = "https://api.tavily.com"

_REFUSED = (tavily_errors.InvalidAPIKeyError, tavily_errors.ForbiddenError)
_PASSING = (
    *(tavily_errors.UsageLimitExceededError, tavily_errors.TimeoutError, httpx.TransportError),
    TimeoutError,
)


class TavilyFinder:
    """Finds pages through tavily-python; a page's text is the part that fits the query best. `excluded_hosts` are left
    out by the service itself."""

    def __init__(
        self,
        limits: ServiceLimits,
        *,
        base_url: str = DEFAULT_URL,
        max_results: int = 3,
        excluded_hosts: tuple[str, ...] = (),
    ) -> None:
        # Without a key the client would silently fall back to an anonymous mode with other limits.
        self._key = read_key("Tavily search", API_KEY_VARIABLE, "or use envs.search = 'offline', which needs no key")
        self._base_url = base_url
        self._service = Service("Tavily search", limits)
        self._max_results = max_results
        self._excluded_hosts = list(excluded_hosts)

    async def find(self, query: str) -> list[FoundPage]:
        return await self._service.ask(lambda: self._attempt(query))

    async def _attempt(self, query: str) -> list[FoundPage] | Failure:
        limit_s = self._service.limits.attempt_limit_s
        try:
            async with asyncio.timeout(limit_s), self._connection() as connection:
                client = AsyncTavilyClient(api_key=self._key, api_base_url=self._base_url, client=connection)
                response = await client.search(
                    query, max_results=self._max_results, exclude_domains=self._excluded_hosts, timeout=limit_s
                )
                return self._pages(response)
        except tavily_errors.BadRequestError:
            return Failure(reason="status 400", bad_query=True)
        except _REFUSED as error:
            return Failure(reason=f"{_kind(error)}: it refused the key in {API_KEY_VARIABLE}")
        except Exception as error:
            return Failure(reason=_kind(error), passing=_may_pass(error))

    def _connection(self) -> httpx.AsyncClient:
        # The client reads the whole answer at once; only below it an endless one can be stopped.
        transport = _CappedTransport(self._service.limits.max_bytes, verify=tls_context(), proxy=_proxy(self._base_url))
        return httpx.AsyncClient(transport=transport, headers={"Accept-Encoding": "identity"})

    def _pages(self, response: dict[str, Any]) -> list[FoundPage]:
        return [
            FoundPage(
                title=self._text(page.get("title")), url=self._text(page["url"]), text=self._text(page.get("content"))
            )
            for page in response["results"][: self._max_results]
        ]

    def _text(self, value: Any) -> str:
        return str(value or "").replace(self._key, "[key]")


class AnswerTooLongError(Exception):
    """More bytes than the limits allow."""


class _CappedTransport(httpx.AsyncHTTPTransport):
    """Breaks an answer off that is longer than `max_bytes`, or compressed although nobody asked for it."""

    def __init__(self, max_bytes: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            await response.aclose()
            raise AnswerTooLongError
        stream = _CappedStream(response, self._max_bytes)
        return httpx.Response(
            response.status_code, headers=response.headers, stream=stream, extensions=response.extensions
        )


class _CappedStream(httpx.AsyncByteStream):
    def __init__(self, response: httpx.Response, max_bytes: int) -> None:
        self._response = response
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_read = 0
        async for chunk in self._response.aiter_raw():
            num_read += len(chunk)
            if num_read > self._max_bytes:
                raise AnswerTooLongError
            yield chunk

    async def aclose(self) -> None:
        await self._response.aclose()


def _proxy(url: str) -> str | None:
    """The proxy that the environment asks for."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


def _may_pass(error: Exception) -> bool:
    """Whether the same request can succeed a little later: overload, server error, connection."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, _PASSING)


def _kind(error: Exception) -> str:
    """What went wrong, without the server's own words."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"status {error.response.status_code}"
    return type(error).__name__
