"""Searches that find pages: Google, Tavily and any MediaWiki; and the tool that shows pages to the planner."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
from tavily import AsyncTavilyClient
from tavily import errors as tavily_errors

from envs.http import Failure, JsonReply, QueryRefusedError, Service, ServiceLimits, request_json, tls_context
from envs.tools.guard import BlockList
from envs.tools.keys import read_key
from envs.types import ToolResult

MAX_QUERY_CHARS = 300
NO_RESULTS = "No results."


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPage:
    """`text` is what the search says of the page: an extract, a snippet."""

    title: str
    url: str
    text: str


class PageFinder(Protocol):
    """A search service. `find` raises QueryRefusedError and ToolUnavailableError."""

    async def find(self, query: str) -> list[FoundPage]: ...


class PageSearchTool:
    """Answers with title and text of the pages that a service finds and the block list allows, one page a line."""

    def __init__(
        self, name: str, description: str, finder: PageFinder, *, block_list: BlockList, max_chars: int
    ) -> None:
        self.name = name
        self.description = description
        self._finder = finder
        self._block_list = block_list
        self._max_chars = max_chars

    async def call(self, arguments: str) -> ToolResult:
        query = " ".join(arguments.split())[:MAX_QUERY_CHARS]
        if not query:
            return ToolResult(text="The search needs a query.", error="empty_query")
        try:
            found = await self._finder.find(query)
        except QueryRefusedError:
            return ToolResult(text="The search engine rejected this query.", error="bad_query")
        pages = [page for page in found if self._block_list.allows(page.url, f"{page.title}\n{page.text}")]
        return ToolResult(text=render_pages(pages, self._max_chars) or NO_RESULTS)


def render_pages(pages: Sequence[FoundPage], max_chars: int) -> str:
    """A line for each page, at most `max_chars` characters together. Each has its share: one endless page must not
    push out the others."""
    share = max(1, max_chars // max(1, len(pages)) - 1)
    lines = (f"{page.title}: {page.text}"[: 2 * max_chars] for page in pages)
    return "\n".join(" ".join(line.split())[:share] for line in lines)[:max_chars]


GOOGLE_KEY_VARIABLE = "GOOGLE_API_KEY"
ENGINE_VARIABLE = "GOOGLE_CSE_ID"
GOOGLE_URL = "https://www.googleapis.com/customsearch/v1"
MAX_RESULTS = 10
_KEYLESS = "or switch on `wikipedia_search`, which needs no key"


class GoogleFinder:
    """Finds pages; a page's text is the search's snippet. Field names as in the reference of `cse.list`:
    https://developers.google.com/custom-search/v1/reference/rest/v1/Search"""

    def __init__(self, limits: ServiceLimits, *, base_url: str = GOOGLE_URL, max_results: int = 3) -> None:
        self._key = read_key("google_search", GOOGLE_KEY_VARIABLE, _KEYLESS)
        self._engine_id = read_key("google_search", ENGINE_VARIABLE, _KEYLESS)
        self._service = Service("Google search", limits)
        self._base_url = base_url
        self._max_results = min(max_results, MAX_RESULTS)

    async def find(self, query: str) -> list[FoundPage]:
        return await self._service.ask(lambda: self._attempt(query))

    async def _attempt(self, query: str) -> list[FoundPage] | Failure:
        reply = await request_json(
            "GET",
            self._base_url,
            self._service.limits,
            params={"cx": self._engine_id, "q": query, "num": str(self._max_results)},
            headers={"X-Goog-Api-Key": self._key},
            secret=self._key,
        )
        return reply if isinstance(reply, Failure) else _google_pages(reply)


def _google_pages(reply: JsonReply) -> list[FoundPage] | Failure:
    if reply.status in (401, 403) or (reply.status == 400 and "API key" in str(reply.value)):
        return Failure(reason=f"status {reply.status}: check {GOOGLE_KEY_VARIABLE} and {ENGINE_VARIABLE}")
    if reply.status == 400:
        return Failure(reason="status 400", bad_query=True)
    if reply.status != 200:
        return Failure(reason=f"status {reply.status}")
    try:
        # Nothing found: the member `items` is left out.
        return [
            FoundPage(title=str(item["title"]), url=str(item["link"]), text=str(item.get("snippet", "")))
            for item in reply.value.get("items", [])
        ]
    except (LookupError, TypeError, AttributeError):
        return Failure(reason="an answer that is not the Programmable Search API's")


TAVILY_KEY_VARIABLE = "TAVILY_API_KEY"
TAVILY_URL = "https://api.tavily.com"

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
        base_url: str = TAVILY_URL,
        max_results: int = 3,
        excluded_hosts: tuple[str, ...] = (),
    ) -> None:
        # Without a key the client would silently fall back to an anonymous mode with other limits.
        self._key = read_key("Tavily search", TAVILY_KEY_VARIABLE, "or use envs.search = 'offline', which needs no key")
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
            return Failure(reason=f"{_kind(error)}: it refused the key in {TAVILY_KEY_VARIABLE}")
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


WIKIPEDIA_URL = "https://en.wikipedia.org/w/api.php"
_PASSING_CODES = ("maxlag", "ratelimited", "readonly")


class WikipediaFinder:
    """Finds pages by full-text search; a page's text is its introduction. The API's `search`, `extracts` and `info`
    modules, format version 2: https://www.mediawiki.org/wiki/API:Query"""

    def __init__(self, limits: ServiceLimits, *, base_url: str = WIKIPEDIA_URL, max_results: int = 3) -> None:
        self._service = Service("Wikipedia", limits)
        self._base_url = base_url
        self._max_results = max_results

    async def find(self, query: str) -> list[FoundPage]:
        return await self._service.ask(lambda: self._attempt(query))

    async def _attempt(self, query: str) -> list[FoundPage] | Failure:
        params = {
            "action": "query",
            "format": "json",
            "formatversion": "2",
            "generator": "search",
            "gsrsearch": query,
            "gsrlimit": str(self._max_results),
            "prop": "extracts|info",
            "exintro": "1",
            "explaintext": "1",
            "exlimit": "max",
            "inprop": "url",
            "redirects": "1",
            "maxlag": "5",
        }
        reply = await request_json("GET", self._base_url, self._service.limits, params=params)
        return reply if isinstance(reply, Failure) else _wiki_pages(reply)


def _wiki_pages(reply: JsonReply) -> list[FoundPage] | Failure:
    if reply.status != 200:
        return Failure(reason=f"status {reply.status}")
    try:
        if "error" in reply.value:
            code = str(reply.value["error"]["code"])
            return Failure(reason=code, passing=code in _PASSING_CODES, bad_query=code not in _PASSING_CODES)
        # Nothing found: the whole member `query` is left out. Pages come in no order of their own.
        found = sorted(reply.value.get("query", {}).get("pages", []), key=lambda page: int(page["index"]))
        return [_page(page) for page in found]
    except (LookupError, TypeError, AttributeError, ValueError):
        return Failure(reason="an answer that is not the MediaWiki API's")


def _page(page: dict[str, Any]) -> FoundPage:
    return FoundPage(title=str(page["title"]), url=str(page["fullurl"]), text=str(page.get("extract", "")))
