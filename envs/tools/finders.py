"""Searches that find pages: Google, Tavily and any MediaWiki; and the tool that shows pages to the planner."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envs.http import PassingError, QueryRefusedError, RefusedError, ServiceLimits, ToolService, UnreadableError
from envs.tools.guard import BlockList
from envs.tools.keys import read_key
from envs.tools.search import MAX_QUERY_CHARS, NO_RESULTS
from envs.types import ToolResult


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


WIKIPEDIA_URL = "https://en.wikipedia.org/w/api.php"
_PASSING_CODES = ("maxlag", "ratelimited", "readonly")


class WikipediaFinder:
    """Finds pages by full-text search; a page's text is its introduction. The API's `search`, `extracts` and `info`
    modules, format version 2: https://www.mediawiki.org/wiki/API:Query"""

    def __init__(self, limits: ServiceLimits, *, base_url: str = WIKIPEDIA_URL, max_results: int = 3) -> None:
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
