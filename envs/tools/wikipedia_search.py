"""Wikipedia, or any other wiki, through the MediaWiki API: it needs no key."""

from typing import Any

from envs.tools.found_pages import FoundPage
from envs.tools.http_json import JsonReply, request_json
from envs.tools.service import Failure, Service, ServiceLimits

DEFAULT_URL = "https://en.wikipedia.org/w/api.php"
_PASSING_CODES = ("maxlag", "ratelimited", "readonly")


class WikipediaFinder:
    """Finds pages by full-text search; a page's text is its introduction. The API's `search`, `extracts` and `info`
    modules, format version 2: https://www.mediawiki.org/wiki/API:Query"""

    def __init__(self, limits: ServiceLimits, *, base_url: str = DEFAULT_URL, max_results: int = 3) -> None:
        self._service = Service("Wikipedia", limits)
        self._base_url = base_url
        self._max_results = max_results

    async def find(self, query: str) -> list[FoundPage]:
        return await self._service.ask(lambda: self._attempt(query))

    async def _attempt(self, query: str) -> list[FoundPage] | Failure:
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
        reply = await request_json("GET", self._base_url, self._service.limits, params=params)
        return reply if isinstance(reply, Failure) else _pages(reply)


def _pages(reply: JsonReply) -> list[FoundPage] | Failure:
    if reply.status != 200:
        return Failure(reason=f"status {reply.status}")
    try:
        if "error" in reply.value:
            code = str(reply.value["error"]["code"])
            return Failure(reason=code, passing=code in _PASSING_CODES, bad_query=code not in _PASSING_CODES)
        # Nothing found: the whole member `query` is left out. Pages come in no order of their own.
        found = sorted(reply.value.get("query", {}).get("pages", []), key=lambda page: int(page["index"]))
        return [_page(page) for page in found]
    except (LookupError, TypeError, AttributeError, ValueError):
        return Failure(reason="an answer that is not the MediaWiki API's")


def _page(page: dict[str, Any]) -> FoundPage:
    return FoundPage(title=str(page["title"]), url=str(page["fullurl"]), text=str(page.get("extract", "")))
