"""Searching the web: services that find pages (Google, Tavily and any MediaWiki), the tool that shows what these say of
pages, and the tool that reads pages for the passages that fit a question best."""

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envs.http import PassingError, QueryRefusedError, RefusedError, ServiceLimits, ToolService, UnreadableError
from envs.tools.guard import BlockList
from envs.tools.keys import read_key
from envs.tools.search import MAX_QUERY_CHARS, NO_RESULTS, PassageIndex, split_passages
from envs.tools.web_fetch import Page, PageFetcher, PageRefusedError
from envs.types import ToolResult

MIN_PASSAGE_CHARS = 80
_HEAD_CHARS = 2000
_BINARY = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
_NAMED = re.compile(r"\s*url:\s*(\S+)(.*)", re.IGNORECASE | re.DOTALL)
# Each run of the letters of a scheme is looked through once: the policy may write a long one.
_BARE = re.compile(r"(?<![a-z0-9+.-])(?:\B[a-z]|[0-9+.-])*+(?P<url>\b[a-z][a-z0-9+.-]*+://\S+)", re.IGNORECASE)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A page where one is named, and what is wanted from it."""

    url: str | None
    query: str


class WebSearchTool:
    """`url: ADDRESS QUESTION` reads that page, a QUESTION alone the pages that `finder` finds for it. Answers with the
    best passages. A page that cannot be had is an observation that says why."""

    name = "web_search"
    description = "read web pages for a question; `url: ADDRESS QUESTION` reads one page"

    def __init__(
        self,
        fetcher: PageFetcher,
        finder: PageFinder,
        *,
        block_list: BlockList,
        max_chars: int,
        max_passages: int = 3,
    ) -> None:
        # At the first page it would take its time out of that page's.
        import trafilatura

        # A page that is no page is nothing to log about: the result says so.
        logging.getLogger(trafilatura.__name__).setLevel(logging.CRITICAL)
        self._fetcher = fetcher
        self._finder = finder
        self._block_list = block_list
        self._max_chars = max_chars
        self._max_passages = max_passages

    async def call(self, arguments: str) -> ToolResult:
        wanted = _wanted(arguments)
        if wanted.url is not None:
            return await self._read_one(wanted.url, wanted.query)
        if not wanted.query:
            return ToolResult(text="The search needs a question or `url: ADDRESS QUESTION`.", error="empty_query")
        try:
            found = await self._finder.find(wanted.query)
        except QueryRefusedError:
            return ToolResult(text="The search engine rejected this query.", error="bad_query")
        return await self._read_all(found, wanted.query)

    async def _read_one(self, url: str, query: str) -> ToolResult:
        try:
            page, text = await self._read(url)
        except PageRefusedError as error:
            return ToolResult(text=f"The page was not read: {error}.", error=error.category)
        note = f"(page cut after {self._fetcher.limits.max_bytes} bytes)\n" if page.cut else ""
        room = self._max_chars - len(note)
        passages = self._best(split_passages(text, self._passage_chars(room)), query)
        return ToolResult(text=note + "\n".join(passages)[:room])

    async def _read_all(self, found: list[FoundPage], query: str) -> ToolResult:
        """Where a page cannot be read, what the search said of it stands in for it."""
        pages = [page for page in found if self._block_list.allows(page.url, f"{page.title}\n{page.text}")]
        texts = await asyncio.gather(*map(self._text_of, pages))
        chars = self._passage_chars(self._max_chars)
        passages = [
            f"{page.title}: {passage}"[:chars]
            for page, text in zip(pages, texts, strict=True)
            for passage in split_passages(text, max(MIN_PASSAGE_CHARS, chars - len(page.title) - 2))
        ]
        return ToolResult(text="\n".join(self._best(passages, query))[: self._max_chars] or NO_RESULTS)

    async def _text_of(self, page: FoundPage) -> str:
        try:
            return (await self._read(page.url))[1]
        except PageRefusedError as error:
            return "" if error.category == "blocked" else page.text

    async def _read(self, url: str) -> tuple[Page, str]:
        page = await self._fetcher.fetch(url)
        try:
            async with asyncio.timeout(self._fetcher.limits.time_limit_s):
                text = await asyncio.to_thread(readable_text, page)
        except TimeoutError:
            raise PageRefusedError("timeout", "its text could not be found in time") from None
        if not text:
            cut = f" in its first {self._fetcher.limits.max_bytes} bytes, where it was cut" if page.cut else ""
            raise PageRefusedError("no_text", f"it holds no readable text{cut}")
        if self._block_list.blocks_text(text):
            raise PageRefusedError("blocked", "it holds a question of a benchmark")
        return page, text

    def _best(self, passages: list[str], query: str) -> list[str]:
        """Without a passage that shares a word with the query, the first ones."""
        return PassageIndex(passages).find(query, self._max_passages) or passages[: self._max_passages]

    def _passage_chars(self, room: int) -> int:
        return max(MIN_PASSAGE_CHARS, room // self._max_passages - 1)


def readable_text(page: Page) -> str:
    """The main text of a page without menus and scripts; empty where there is none."""
    text = page.text
    if page.media_type not in ("text/plain", "application/json"):
        import trafilatura

        if "<html" not in text[:_HEAD_CHARS].lower():
            text = f"<html><body>{text}</body></html>"
        text = trafilatura.extract(text, include_comments=False) or trafilatura.html2txt(text)
    return _BINARY.sub("", text).strip()


def _wanted(arguments: str) -> _Wanted:
    if named := _NAMED.match(arguments):
        return _Wanted(url=named[1].strip("<>|,;"), query=_query(named[2]))
    if bare := _BARE.search(arguments):
        beside = arguments[: bare.start("url")] + " " + arguments[bare.end("url") :]
        return _Wanted(url=bare["url"].strip("<>|,;"), query=_query(beside))
    return _Wanted(url=None, query=_query(arguments))


def _query(text: str) -> str:
    return " ".join(text.replace("|", " ").split()).removeprefix("query: ")[:MAX_QUERY_CHARS]


GOOGLE_KEY_VARIABLE = "GOOGLE_API_KEY"
ENGINE_VARIABLE = "GOOGLE_CSE_ID"
GOOGLE_URL = "https://www.googleapis.com/customsearch/v1"
MAX_RESULTS = 10
_KEYLESS = "or switch on `wikipedia_search`, which needs no key"


class GoogleFinder:
    """Finds pages; a page's text is the search's snippet. Field names as in the reference of `cse.list`:
    https://developers.google.com/custom-search/v1/reference/rest/v1/Search"""

    def __init__(self, limits: ServiceLimits, *, base_url: str = GOOGLE_URL, max_results: int = 3) -> None:
        key = read_key("google_search", GOOGLE_KEY_VARIABLE, _KEYLESS)
        self._engine_id = read_key("google_search", ENGINE_VARIABLE, _KEYLESS)
        # Not as a parameter: addresses stand in the logs of HTTP clients and servers.
        self._service = ToolService(base_url, limits, key=key, key_header="X-Goog-Api-Key", name="Google search")
        self._max_results = min(max_results, MAX_RESULTS)

    async def find(self, query: str) -> list[FoundPage]:
        return await self._service.ask(lambda: self._attempt(query))

    async def _attempt(self, query: str) -> list[FoundPage]:
        params = {"cx": self._engine_id, "q": query, "num": str(self._max_results)}
        try:
            return _google_pages(await self._service.send("GET", "", params=params))
        except RefusedError as error:
            if error.status == 400 and "API key" not in error.words:
                raise QueryRefusedError(str(error)) from None
            if error.status in (400, 401, 403):
                raise RefusedError(f"{error}: check {GOOGLE_KEY_VARIABLE} and {ENGINE_VARIABLE}") from None
            raise


def _google_pages(reply: Any) -> list[FoundPage]:
    try:
        # Nothing found: the member `items` is left out.
        return [
            FoundPage(title=str(item["title"]), url=str(item["link"]), text=str(item.get("snippet", "")))
            for item in reply.get("items", [])
        ]
    except (LookupError, TypeError, AttributeError):
        raise UnreadableError("an answer that is not the Programmable Search API's") from None


TAVILY_KEY_VARIABLE = "TAVILY_API_KEY"
TAVILY_URL = "https://api.tavily.com"


class TavilyFinder:
    """Finds pages; a page's text is the part that fits the query best. `excluded_hosts` are left out by the service
    itself. Field names and statuses as in https://docs.tavily.com/documentation/api-reference/endpoint/search"""

    def __init__(
        self,
        limits: ServiceLimits,
        *,
        base_url: str = TAVILY_URL,
        max_results: int = 3,
        excluded_hosts: tuple[str, ...] = (),
    ) -> None:
        key = read_key("Tavily search", TAVILY_KEY_VARIABLE, "or use envs.search = 'offline', which needs no key")
        self._service = ToolService(base_url, limits, key=key, name="Tavily search")
        self._max_results = max_results
        self._excluded_hosts = list(excluded_hosts)

    async def find(self, query: str) -> list[FoundPage]:
        return await self._service.ask(lambda: self._attempt(query))

    async def _attempt(self, query: str) -> list[FoundPage]:
        body = {"query": query, "max_results": self._max_results, "exclude_domains": self._excluded_hosts}
        try:
            return _tavily_pages(await self._service.send("POST", "/search", body=body))[: self._max_results]
        except RefusedError as error:
            if error.status == 400:
                raise QueryRefusedError(str(error)) from None
            if error.status in (401, 403, 432, 433):
                raise RefusedError(f"{error}: it refused the key in {TAVILY_KEY_VARIABLE}") from None
            raise


def _tavily_pages(reply: Any) -> list[FoundPage]:
    try:
        return [
            FoundPage(title=str(page.get("title") or ""), url=str(page["url"]), text=str(page.get("content") or ""))
            for page in reply["results"]
        ]
    except (LookupError, TypeError, AttributeError):
        raise UnreadableError("an answer that is not the Tavily Search API's") from None


_PASSING_CODES = ("maxlag", "ratelimited", "readonly")


class WikipediaFinder:
    """Finds pages by full-text search; a page's text is its introduction. The API's `search`, `extracts` and `info`
    modules, format version 2: https://www.mediawiki.org/wiki/API:Query"""

    def __init__(self, limits: ServiceLimits, *, base_url: str, max_results: int) -> None:
        self._service = ToolService(base_url, limits, name="Wikipedia")
        self._max_results = max_results

    async def find(self, query: str) -> list[FoundPage]:
        return await self._service.ask(lambda: self._attempt(query))

    async def _attempt(self, query: str) -> list[FoundPage]:
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
        return _wiki_pages(await self._service.send("GET", "", params=params))


def _wiki_pages(reply: Any) -> list[FoundPage]:
    try:
        if "error" in reply:
            code = str(reply["error"]["code"])
            raise PassingError(code) if code in _PASSING_CODES else QueryRefusedError(code)
        # Nothing found: the whole member `query` is left out. Pages come in no order of their own.
        found = sorted(reply.get("query", {}).get("pages", []), key=lambda page: int(page["index"]))
        return [_page(page) for page in found]
    except (LookupError, TypeError, AttributeError, ValueError):
        raise UnreadableError("an answer that is not the MediaWiki API's") from None


def _page(page: dict[str, Any]) -> FoundPage:
    return FoundPage(title=str(page["title"]), url=str(page["fullurl"]), text=str(page.get("extract", "")))
