"""Searches: an offline index, services that find pages, and the tools that show extracts or read whole pages."""

import asyncio
import logging
import random
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from urllib.parse import parse_qsl

from configs.api_keys import required_key
from envs.tools.guard import BlockList
from envs.tools.http import RefusedError, RequestError, Service, ServiceLimits
from envs.tools.web_fetch import Page, PageFetcher
from envs.types import ToolResult, ToolUnavailableError

MAX_QUERY_CHARS = 300
NO_RESULTS = "No results."
MAX_RESULTS = 3
"""Pages per search, and passages that `web_search` returns."""
MIN_PASSAGE_CHARS = 80
LATENCY_SPREAD = 0.8
"""Standard deviation of the logarithm of a simulated latency: one query in six takes over 2.2 times the median."""
MAX_LATENCY_S = 10.0
TAVILY_KEY_VARIABLE = "TAVILY_API_KEY"
TAVILY_URL = "https://api.tavily.com"

_HEAD_CHARS = 2000
_MARKS = re.compile(r"\b(?:url|query):|[|<>]", re.IGNORECASE)
_BINARY = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
# Possessive, so that a long run of scheme letters from the policy is scanned once.
_URL = re.compile(r"(?<![a-z0-9+.-])(?:\B[a-z]|[0-9+.-])*+(?P<url>\b[a-z][a-z0-9+.-]*+://\S+)", re.IGNORECASE)
_WIKI_QUERY = (
    "action=query&format=json&formatversion=2&generator=search&prop=extracts|info&inprop=url"
    "&exintro=1&explaintext=1&exlimit=max&redirects=1&maxlag=5"
)
_PASSING_WIKI_CODES = re.compile("maxlag|ratelimited|readonly|too-busy|backend-error|internal_api_error")
_WORD = re.compile(r"\w+")
_COMMON = "a an and are as at be by for from how in is it many much of on one or that the to was what which who"
_STOP_WORDS = frozenset(_COMMON.split())
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class PassageIndex:
    """A full-text index in SQLite, which is in every Python and starts at once."""

    def __init__(self, passages: Sequence[str]) -> None:
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE passages USING fts5(text, tokenize = 'porter unicode61')")
        self._index.executemany("INSERT INTO passages VALUES (?)", [(passage,) for passage in passages])

    def find(self, query: str, max_results: int) -> list[str]:
        """Return the passages that share a word with the query, best first."""
        keywords = [word for word in _WORD.findall(query.lower()) if word not in _STOP_WORDS]
        if not keywords:
            return []
        # A quoted word is a plain term, so that a query cannot use the syntax of the index.
        terms = " OR ".join(f'"{word}"' for word in keywords)
        best = "SELECT text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?"
        return [text for (text,) in self._index.execute(best, (terms, max_results))]


def split_passages(text: str, max_chars: int) -> list[str]:
    """Split each paragraph into one-line runs of whole sentences of at most `max_chars` characters, or cut ones."""
    passages = []
    for paragraph in text.splitlines():
        passage = ""
        for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
            if passage and len(passage) + 1 + len(sentence) > max_chars:
                passages.append(passage)
                passage = ""
            passage = f"{passage} {sentence}" if passage else sentence
            cut = (len(passage) - 1) // max_chars * max_chars  # a page may be one long sentence
            passages += [passage[start : start + max_chars] for start in range(0, cut, max_chars)]
            passage = passage[cut:]
        if passage:
            passages.append(passage)
    return passages


class OfflineSearchTool:
    """A search that returns the best passage, after a simulated latency if `latency_s` is set."""

    name = "search"
    description = "look up facts by a few keywords, e.g. an item's name"

    def __init__(self, passages: Sequence[str], *, max_chars: int = 400, latency_s: float = 0.0) -> None:
        self._max_chars = max_chars
        self._latency_s = latency_s
        self._index = PassageIndex(passages)

    async def call(self, arguments: str) -> ToolResult:
        if not arguments.strip():
            return ToolResult(text="The search needs keywords.", error="empty_query")
        if self._latency_s:
            await asyncio.sleep(simulated_latency_s(arguments, self._latency_s))
        (passage,) = self._index.find(arguments[:MAX_QUERY_CHARS], 1) or (NO_RESULTS,)
        return ToolResult(text=passage[: self._max_chars])


def simulated_latency_s(query: str, median_s: float) -> float:
    """Return a lognormal latency of at most MAX_LATENCY_S, the same for the same query in every process."""
    factor = random.Random(f"latency|{query}").lognormvariate(0.0, LATENCY_SPREAD)
    return min(MAX_LATENCY_S, median_s * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPage:
    """A page that a search found."""

    title: str
    url: str
    text: str
    """An extract or snippet of the page."""


class PageFinder(Protocol):
    """A search service; raises RefusedError for the query's fault, and ToolUnavailableError."""

    async def find(self, query: str) -> list[FoundPage]: ...


class TavilyFinder:
    """Tavily's search; the text of a page is the part that fits the query best. It also extracts whole pages.

    Fields: https://docs.tavily.com/documentation/api-reference/endpoint/search
    """

    def __init__(
        self, limits: ServiceLimits, *, base_url: str = TAVILY_URL, excluded_hosts: tuple[str, ...] = ()
    ) -> None:
        # Imported now, and only where it is used: the import takes a second.
        from tavily import AsyncTavilyClient

        key = required_key("Tavily search", TAVILY_KEY_VARIABLE, "or use envs.search = 'offline', which needs no key")
        advice = f"check the key in {TAVILY_KEY_VARIABLE}"
        self._service = Service("Tavily search", base_url, limits, key=key, advice=advice, takes_queries=True)
        self._new_client = partial(AsyncTavilyClient, key, api_base_url=base_url)
        self._excluded_hosts = list(excluded_hosts)

    async def find(self, query: str) -> list[FoundPage]:
        """Return the pages for a query; the service leaves out the excluded hosts."""
        results = await self._ask("search", query=query, max_results=MAX_RESULTS, exclude_domains=self._excluded_hosts)
        return [
            FoundPage(title=str(page.get("title") or ""), url=page["url"], text=str(page.get("content") or ""))
            for page in results[:MAX_RESULTS]
        ]

    async def extract(self, urls: Sequence[str]) -> dict[str, str]:
        """Return the text of the pages that the service can read, by address."""
        limit_s = self._service.limits.attempt_limit_s
        results = await self._ask("extract", urls=list(urls), format="text", timeout=limit_s)
        return {page["url"]: str(page.get("raw_content") or "") for page in results}

    async def _ask(self, method: str, **options: object) -> list[dict[str, str]]:
        async def attempt() -> list[dict[str, str]]:
            async with self._service.client() as http:
                reply = await getattr(self._new_client(client=http), method)(**options)
            return [{**page, "url": str(page["url"])} for page in self._service.without_key(reply)["results"]]

        return await self._service.ask(attempt)


class WikipediaFinder:
    """Full-text search of a MediaWiki; the text of a page is its introduction.

    Modules `search`, `extracts` and `info`, format version 2: https://www.mediawiki.org/wiki/API:Query
    """

    def __init__(self, limits: ServiceLimits, *, base_url: str) -> None:
        self._service = Service("Wikipedia", base_url, limits)

    async def find(self, query: str) -> list[FoundPage]:
        return await self._service.ask(lambda: self._attempt(query))

    async def _attempt(self, query: str) -> list[FoundPage]:
        asked = {"gsrsearch": query, "gsrlimit": str(MAX_RESULTS)}
        reply = await self._service.send("GET", "", params=dict(parse_qsl(_WIKI_QUERY)) | asked)
        if "error" in reply:
            if _PASSING_WIKI_CODES.search(code := str(reply["error"]["code"])):
                raise RequestError(code, passing=True)
            raise RefusedError("bad_query", "the wiki does not take this query")
        # `query` is missing if nothing was found. The pages are not sorted.
        pages = sorted(reply.get("query", {}).get("pages", []), key=lambda page: int(page["index"]))
        return [
            FoundPage(title=str(page["title"]), url=str(page["fullurl"]), text=str(page.get("extract", "")))
            for page in pages
        ]


class PageSearchTool:
    """A search that returns title and extract of each allowed page, one per line.

    A rejected query or an unreadable page is an observation that says why.
    """

    def __init__(
        self, name: str, description: str, finder: PageFinder, *, block_list: BlockList, max_chars: int
    ) -> None:
        self.name = name
        self.description = description
        self._finder = finder
        self._block_list = block_list
        self._max_chars = max_chars

    async def call(self, arguments: str) -> ToolResult:
        try:
            text = await self._answer(arguments)
        except RefusedError as error:
            return ToolResult(text=f"The query or page was rejected: {error}.", error=error.category)
        return ToolResult(text=text[: self._max_chars] or NO_RESULTS)

    async def _answer(self, arguments: str) -> str:
        pages = await self._find(" ".join(arguments.split())[:MAX_QUERY_CHARS])
        # Each page has the same share, so that one long page cannot push out the others.
        share = max(1, self._max_chars // max(1, len(pages)) - 1)
        lines = (f"{page.title}: {page.text}"[: 2 * self._max_chars] for page in pages)
        return "\n".join(" ".join(line.split())[:share] for line in lines)

    async def _find(self, query: str) -> list[FoundPage]:
        if not query:
            raise RefusedError("empty_query", "the search needs a question")
        pages = await self._finder.find(query)
        return [page for page in pages if self._block_list.allows(page.url, f"{page.title}\n{page.text}")]


class WebSearchTool(PageSearchTool):
    """A tool that returns the best passages for a question, of the page at its address or of those that are found.

    Tavily reads its pages itself.
    """

    def __init__(self, fetcher: PageFetcher, finder: PageFinder, *, block_list: BlockList, max_chars: int) -> None:
        description = "read web pages for a question; `url: ADDRESS QUESTION` reads one page"
        super().__init__("web_search", description, finder, block_list=block_list, max_chars=max_chars)
        # Imported now: at the first page it would take up that page's time.
        import trafilatura

        # Unreadable pages are reported in the result, not in the log.
        logging.getLogger(trafilatura.__name__).setLevel(logging.CRITICAL)
        self._fetcher = fetcher

    async def _answer(self, arguments: str) -> str:
        if found := _URL.search(arguments):
            rest = arguments[: found.start("url")] + " " + arguments[found.end("url") :]
            page, text = await self._fetch(found["url"].strip("<>|,;"))
            note = f"(page cut after {self._fetcher.limits.max_bytes} bytes)\n" if page.cut else ""
            chars = max(MIN_PASSAGE_CHARS, (self._max_chars - len(note)) // MAX_RESULTS - 1)
            return note + _best(split_passages(text, chars), _query(rest))
        query = _query(arguments)
        pages = await self._find(query)
        if isinstance(self._finder, TavilyFinder):
            texts = await self._extracted(self._finder, pages)
        else:
            texts = await asyncio.gather(*map(self._fetched_text, pages))
        chars = max(MIN_PASSAGE_CHARS, self._max_chars // MAX_RESULTS - 1)
        passages = [
            f"{page.title}: {passage}"[:chars]
            for page, text in zip(pages, texts, strict=True)
            for passage in split_passages(text, max(MIN_PASSAGE_CHARS, chars - len(page.title) - 2))
        ]
        return _best(passages, query)

    async def _extracted(self, finder: TavilyFinder, pages: list[FoundPage]) -> list[str]:
        """Return the text of each page, or the search's extract of a page that cannot be read."""
        try:
            texts = await finder.extract([page.url for page in pages]) if pages else {}
        except (RefusedError, ToolUnavailableError):
            texts = {}
        bounded = [_BINARY.sub("", texts.get(page.url, ""))[: self._fetcher.limits.max_bytes] for page in pages]
        return [
            "" if self._block_list.blocks_text(text) else text.strip() or page.text
            for page, text in zip(pages, bounded, strict=True)
        ]

    async def _fetched_text(self, page: FoundPage) -> str:
        """Return the text of a page, or the search's extract if it cannot be read."""
        try:
            return (await self._fetch(page.url))[1]
        except RefusedError as error:
            return "" if error.category == "blocked" else page.text

    async def _fetch(self, url: str) -> tuple[Page, str]:
        page = await self._fetcher.fetch(url)
        try:
            async with asyncio.timeout(self._fetcher.limits.time_limit_s):
                text = await asyncio.to_thread(readable_text, page)
        except TimeoutError:
            raise RefusedError("timeout", "its text could not be extracted in time") from None
        if not text:
            cut = f" in its first {self._fetcher.limits.max_bytes} bytes, where it was cut" if page.cut else ""
            raise RefusedError("no_text", f"it holds no readable text{cut}")
        if self._block_list.blocks_text(text):
            raise RefusedError("blocked", "it holds a question of a benchmark")
        return page, text


def _best(passages: list[str], query: str) -> str:
    """Return the best passages, or the first ones if none shares a word with the query."""
    return "\n".join(PassageIndex(passages).find(query, MAX_RESULTS) or passages[:MAX_RESULTS])


def readable_text(page: Page) -> str:
    """Return the main text of a page without menus and scripts, or an empty text."""
    text = page.text
    if page.media_type not in ("text/plain", "application/json"):
        import trafilatura

        if "<html" not in text[:_HEAD_CHARS].lower():
            text = f"<html><body>{text}</body></html>"
        text = trafilatura.extract(text, include_comments=False) or trafilatura.html2txt(text)
    return _BINARY.sub("", text).strip()


def _query(text: str) -> str:
    return " ".join(_MARKS.sub(" ", text).split())[:MAX_QUERY_CHARS]
