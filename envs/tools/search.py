"""Offline search: BM25 over a fixed set of passages, no network."""

import re
import sqlite3
from collections.abc import Sequence

from envs.types import ToolResult

MAX_QUERY_CHARS = 300
NO_RESULTS = "No results."
_STOP_WORDS = frozenset(
    (
        *("a", "an", "and", "are", "as", "at", "be", "by", "for", "from", "how", "in", "is", "it", "many", "much"),
        *("of", "on", "one", "or", "that", "the", "to", "was", "what", "which", "who"),
    )
)


class OfflineSearchTool:
    """Answers with the passages that match best, one a line, best first.

    SQLite's full-text index does the ranking: it is in every Python, needs nothing else and starts at once.
    """

    name = "search"
    description = "look up facts by a few keywords, e.g. an item's name"

    def __init__(self, passages: Sequence[str], *, max_results: int = 3, max_chars: int = 400) -> None:
        if not passages or max_results < 1 or max_chars < 1:
            raise ValueError(
                "need at least one passage, max_results >= 1 and max_chars >= 1, "
                f"got {len(passages)} passages, {max_results=}, {max_chars=}"
            )
        self._max_results = max_results
        self._max_chars = max_chars
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE passages USING fts5(text, tokenize = 'porter unicode61')")
        self._index.executemany("INSERT INTO passages VALUES (?)", [(passage,) for passage in passages])

    async def call(self, arguments: str) -> ToolResult:
        if not arguments.strip():
            return ToolResult(text="The search needs keywords.", error="empty_query")
        found = "\n".join(self.find(arguments[:MAX_QUERY_CHARS]))
        return ToolResult(text=found[: self._max_chars] or NO_RESULTS)

    def find(self, query: str) -> list[str]:
        """The best passages that share a word with the query."""
        words = [word for word in re.findall(r"\w+", query.lower()) if word not in _STOP_WORDS]
        if not words:
            return []
        # Quoted, every word is a plain term: nothing in a query can reach the index's own query language.
        terms = " OR ".join(f'"{word}"' for word in words)
        rows = self._index.execute(
            "SELECT text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?",
            (terms, self._max_results),
        )
        return [text for (text,) in rows]
