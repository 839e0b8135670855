"""Offline search: passages of a text, ranked for a query by BM25."""

import asyncio
import random
import re
import sqlite3
from collections.abc import Sequence

from envs.types import ToolResult

MAX_QUERY_CHARS = 300
NO_RESULTS = "No results."
LATENCY_SPREAD = 0.8
"""Standard deviation of the logarithm of a simulated latency: one query in six takes over 2.2 times the median."""
MAX_LATENCY_S = 10.0

_STOP_WORDS = frozenset(
    (
        *("a", "an", "and", "are", "as", "at", "be", "by", "for", "from", "how", "in", "is", "it", "many", "much"),
        *("of", "on", "one", "or", "that", "the", "to", "was", "what", "which", "who"),
    )
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class PassageIndex:
    """A full-text index in SQLite, which is in every Python and starts at once."""

    def __init__(self, passages: Sequence[str]) -> None:
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE passages USING fts5(text, tokenize = 'porter unicode61')")
        self._index.executemany("INSERT INTO passages VALUES (?)", [(passage,) for passage in passages])

    def find(self, query: str, max_results: int) -> list[str]:
        """Return the passages that share a word with the query, best first."""
        keywords = [word for word in re.findall(r"\w+", query.lower()) if word not in _STOP_WORDS]
        if not keywords:
            return []
        # A quoted word is a plain term, so that a query cannot use the syntax of the index.
        terms = " OR ".join(f'"{word}"' for word in keywords)
        rows = self._index.execute(
            "SELECT text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?",
            (terms, max_results),
        )
        return [text for (text,) in rows]


def split_passages(text: str, max_chars: int) -> list[str]:
    """Split each paragraph into one-line runs of whole sentences of at most `max_chars` characters.

    A longer sentence is cut.
    """
    passages = []
    for paragraph in text.splitlines():
        passage = ""
        for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
            if passage and len(passage) + 1 + len(sentence) > max_chars:
                passages.append(passage)
                passage = ""
            passage = f"{passage} {sentence}" if passage else sentence
            while len(passage) > max_chars:
                passages.append(passage[:max_chars])
                passage = passage[max_chars:]
        if passage:
            passages.append(passage)
    return passages


class OfflineSearchTool:
    """A search that returns the best passages, one per line, after a simulated latency if `latency_s` is set."""

    name = "search"
    description = "look up facts by a few keywords, e.g. an item's name"

    def __init__(
        self, passages: Sequence[str], *, max_results: int = 1, max_chars: int = 400, latency_s: float = 0.0
    ) -> None:
        self._max_results = max_results
        self._max_chars = max_chars
        self._latency_s = latency_s
        self._index = PassageIndex(passages)

    async def call(self, arguments: str) -> ToolResult:
        if not arguments.strip():
            return ToolResult(text="The search needs keywords.", error="empty_query")
        if self._latency_s:
            await asyncio.sleep(simulated_latency_s(arguments, self._latency_s))
        passages = "\n".join(self._index.find(arguments[:MAX_QUERY_CHARS], self._max_results))
        return ToolResult(text=passages[: self._max_chars] or NO_RESULTS)


def simulated_latency_s(query: str, median_s: float) -> float:
    """Return a lognormal latency of at most MAX_LATENCY_S, the same for the same query in every process."""
    factor = random.Random(f"latency|{query}").lognormvariate(0.0, LATENCY_SPREAD)
    return min(MAX_LATENCY_S, median_s * factor)
