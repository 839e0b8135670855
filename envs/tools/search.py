"""Offline search: passages of a text, ranked for a query by BM25, without a network."""

import asyncio
import random
import re
import sqlite3
from collections.abc import Iterator, Sequence

from envs.types import ToolResult

_STOP_WORDS = frozenset(
    (
        *("a", "an", "and", "are", "as", "at", "be", "by", "for", "from", "how", "in", "is", "it", "many", "much"),
        *("of", "on", "one", "or", "that", "the", "to", "was", "what", "which", "who"),
    )
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class PassageIndex:
    """SQLite's full-text index does the ranking: it is in every Python, needs nothing else and starts at once."""

    def __init__(self, passages: Sequence[str]) -> None:
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE passages USING fts5(text, tokenize = 'porter unicode61')")
        self._index.executemany("INSERT INTO passages VALUES (?)", [(passage,) for passage in passages])

    def find(self, query: str, max_results: int) -> list[str]:
        """The passages that share a word with the query, best first."""
        words = [word for word in re.findall(r"\w+", query.lower()) if word not in _STOP_WORDS]
        if not words:
            return []
        # Quoted, every word is a plain term: nothing in a query can reach the index's own query language.
        terms = " OR ".join(f'"{word}"' for word in words)
        rows = self._index.execute(
            "SELECT text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?",
            (terms, max_results),
        )
        return [text for (text,) in rows]


def split_passages(text: str, max_chars: int) -> list[str]:
    """Runs of whole sentences of one paragraph, each of at most `max_chars` characters and on one line.

    A longer sentence is cut at `max_chars`.
    """
    return [passage for paragraph in text.splitlines() for passage in _split_paragraph(paragraph, max_chars)]


def _split_paragraph(paragraph: str, max_chars: int) -> Iterator[str]:
    passage = ""
    for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
        if passage and len(passage) + 1 + len(sentence) > max_chars:
            yield passage
            passage = ""
        passage = f"{passage} {sentence}" if passage else sentence
        while len(passage) > max_chars:
            yield passage[:max_chars]
            passage = passage[max_chars:]
    if passage:
        yield passage


MAX_QUERY_CHARS = 300
NO_RESULTS = "No results."
LATENCY_SPREAD = 0.8
"""Standard deviation of a simulated latency's logarithm: one query in six takes more than 2.2 times the median."""
MAX_LATENCY_S = 10.0


class OfflineSearchTool:
    """Answers with the passages that match best, one a line, best first.

    With `latency_s` every answer waits, as a remote service's would: see `simulated_latency_s`.
    """

    name = "search"
    description = "look up facts by a few keywords, e.g. an item's name"

    def __init__(
        self, passages: Sequence[str], *, max_results: int = 3, max_chars: int = 400, latency_s: float = 0.0
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
        found = "\n".join(self.find(arguments[:MAX_QUERY_CHARS]))
        return ToolResult(text=found[: self._max_chars] or NO_RESULTS)

    def find(self, query: str) -> list[str]:
        """The best passages that share a word with the query."""
        return self._index.find(query, self._max_results)


def simulated_latency_s(query: str, median_s: float) -> float:
    """Lognormal around the median, at most MAX_LATENCY_S; the same for the same query in every process."""
    factor = random.Random(f"latency|{query}").lognormvariate(0.0, LATENCY_SPREAD)
    return min(MAX_LATENCY_S, median_s * factor)
