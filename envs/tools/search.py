"""Offline search: BM25 over a fixed set of passages, no network."""

import asyncio
import random
from collections.abc import Sequence

from envs.tools.passages import PassageIndex
from envs.types import ToolResult

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
        if not passages or max_results < 1 or max_chars < 1:
            raise ValueError(
                "need at least one passage, max_results >= 1 and max_chars >= 1, "
                f"got {len(passages)} passages, {max_results=}, {max_chars=}"
            )
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
