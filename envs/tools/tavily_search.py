"""Web search through Tavily."""

import asyncio
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
from tavily import AsyncTavilyClient
from tavily import errors as tavily_errors

from envs.types import ToolResult, ToolUnavailableError

API_KEY_VARIABLE = "TAVILY_API_KEY"
MAX_QUERY_CHARS = 400
NO_RESULTS = "No results."
# Hosts that print the benchmarks together with their answers.
ANSWER_HOSTS = ("artofproblemsolving.com", "huggingface.co", "kaggle.com", "4nums.com", "github.com")

_REFUSED = (tavily_errors.InvalidAPIKeyError, tavily_errors.ForbiddenError)
_PASSING = (tavily_errors.UsageLimitExceededError, tavily_errors.TimeoutError, httpx.TransportError)


@dataclass(frozen=True, slots=True, kw_only=True)
class TavilyLimits:
    """The bounds of one call; the time limit covers all attempts and the pauses between them."""

    max_results: int = 3
    max_chars: int = 1200
    max_attempts: int = 4
    attempt_limit_s: float = 10.0
    time_limit_s: float = 30.0
    first_pause_s: float = 0.5


class TavilySearchTool:
    """Answers with title and content of the best pages, one page a line."""

    name = "search"
    description = "search the web with a short query of a few keywords"

    def __init__(
        self,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        limits: TavilyLimits | None = None,
        excluded_hosts: tuple[str, ...] = ANSWER_HOSTS,
    ) -> None:
        self._api_key = (api_key or os.environ.get(API_KEY_VARIABLE, "")).strip()
        # Without a key the client would silently fall back to an anonymous mode with other limits.
        if not self._api_key:
            raise ValueError(f"Tavily search needs an API key: set {API_KEY_VARIABLE}")
        self._limits = limits or TavilyLimits()
        self._excluded_hosts = list(excluded_hosts)
        self._client = AsyncTavilyClient(api_key=self._api_key, api_base_url=base_url)

    async def call(self, arguments: str) -> ToolResult:
        query = arguments.strip()[:MAX_QUERY_CHARS]
        if not query:
            return ToolResult(text="The search needs a query.", error="empty_query")
        try:
            async with asyncio.timeout(self._limits.time_limit_s):
                outcome = await self._search_with_retries(query)
        except TimeoutError:
            outcome = ToolUnavailableError(f"Tavily gave no answer within {self._limits.time_limit_s} s")
        # Raised here and not in an `except`: the client's error may quote the key, and would stay
        # attached as the context of this one.
        if isinstance(outcome, ToolUnavailableError):
            raise outcome
        return outcome

    async def close(self) -> None:
        await self._client.close()

    async def _search_with_retries(self, query: str) -> ToolResult | ToolUnavailableError:
        failure = ""
        for attempt in range(self._limits.max_attempts):
            if attempt:
                # Jitter keeps many workers that were refused together from coming back together.
                await asyncio.sleep(self._limits.first_pause_s * 2 ** (attempt - 1) * random.uniform(1, 1.5))
            try:
                return self._result(await self._search(query))
            except tavily_errors.BadRequestError:
                return ToolResult(text="The search engine rejected this query.", error="bad_query")
            except _REFUSED as error:
                return ToolUnavailableError(f"Tavily refused the key in {API_KEY_VARIABLE} ({_kind(error)})")
            except Exception as error:
                failure = _kind(error)
                if not _may_pass(error):
                    return ToolUnavailableError(f"Tavily search failed with {failure}")
        return ToolUnavailableError(f"Tavily search failed {self._limits.max_attempts} times, at last with {failure}")

    async def _search(self, query: str) -> dict:
        return await self._client.search(
            query,
            max_results=self._limits.max_results,
            exclude_domains=self._excluded_hosts,
            timeout=self._limits.attempt_limit_s,
        )

    def _result(self, response: dict) -> ToolResult:
        pages = response["results"][: self._limits.max_results]
        text = "\n".join(self._lines(pages))[: self._limits.max_chars]
        return ToolResult(text=text.replace(self._api_key, "[key]") or NO_RESULTS)

    def _lines(self, pages: list[dict]) -> Iterator[str]:
        # A share for each page: one endless page must not push out the others.
        share = self._limits.max_chars // max(1, len(pages)) - 1
        for page in pages:
            text = f"{page.get('title') or ''}: {page.get('content') or ''}"
            yield " ".join(text[: 2 * self._limits.max_chars].split())[: max(1, share)]


def _may_pass(error: Exception) -> bool:
    """Whether the same request can succeed a little later: overload, server error, connection."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, _PASSING)


def _kind(error: Exception) -> str:
    """What went wrong, without the server's own words."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"status {error.response.status_code}"
    return type(error).__name__
