"""Reading the web: the passages of pages that fit a question best."""

import asyncio
import logging
import re
from dataclasses import dataclass

from envs.http import QueryRefusedError
from envs.tools.finders import FoundPage, PageFinder
from envs.tools.guard import BlockList
from envs.tools.search import MAX_QUERY_CHARS, NO_RESULTS, PassageIndex, split_passages
from envs.tools.web_fetch import Page, PageFetcher, PageRefusedError
from envs.types import ToolResult

MIN_PASSAGE_CHARS = 80
_HEAD_CHARS = 2000
_BINARY = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
_NAMED = re.compile(r"\s*url:\s*(\S+)(.*)", re.IGNORECASE | re.DOTALL)
_BARE = re.compile(r"(?P<before>.*?)(?P<url>\b[a-z][a-z0-9+.-]*://\S+)(?P<after>.*)", re.IGNORECASE | re.DOTALL)


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
            async with asyncio.timeout(self._fetcher.limits.deadline_s):
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
    if bare := _BARE.match(arguments):
        return _Wanted(url=bare["url"].strip("<>|,;"), query=_query(bare["before"] + " " + bare["after"]))
    return _Wanted(url=None, query=_query(arguments))


def _query(text: str) -> str:
    return " ".join(text.replace("|", " ").split()).removeprefix("query: ")[:MAX_QUERY_CHARS]
