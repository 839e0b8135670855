"""Passages of text: cutting a long text into them, and ranking them for a query by BM25."""

import re
import sqlite3
from collections.abc import Iterator, Sequence

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
