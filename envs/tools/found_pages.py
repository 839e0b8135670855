"""Pages that a search finds, and the tool that shows them to the planner."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from envs.tools.block_list import BlockList
from envs.tools.service import QueryRefusedError
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
