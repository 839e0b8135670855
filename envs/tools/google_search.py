"""Google through the Programmable Search JSON API."""

from envs.tools.found_pages import FoundPage
from envs.tools.http_json import JsonReply, request_json
from envs.tools.keys import read_key
from envs.tools.service import Failure, Service, ServiceLimits

API_KEY_VARIABLE = "GOOGLE_API_KEY"
ENGINE_VARIABLE = "GOOGLE_CSE_ID"
DEFAULT_URL = "https://www.googleapis.com/customsearch/v1"
MAX_RESULTS = 10
_KEYLESS = "or switch on `wikipedia_search`, which needs no key"


class GoogleFinder:
    """Finds pages; a page's text is the search's snippet. Field names as in the reference of `cse.list`:
    https://developers.google.com/custom-search/v1/reference/rest/v1/Search"""

    def __init__(self, limits: ServiceLimits, *, base_url: str = DEFAULT_URL, max_results: int = 3) -> None:
        self._key = read_key("google_search", API_KEY_VARIABLE, _KEYLESS)
        self._engine_id = read_key("google_search", ENGINE_VARIABLE, _KEYLESS)
        self._service = Service("Google search", limits)
        self._base_url = base_url
        self._max_results = min(max_results, MAX_RESULTS)

    async def find(self, query: str) -> list[FoundPage]:
        return await self._service.ask(lambda: self._attempt(query))

    async def _attempt(self, query: str) -> list[FoundPage] | Failure:
        reply = await request_json(
            "GET",
            self._base_url,
            self._service.limits,
            params={"cx": self._engine_id, "q": query, "num": str(self._max_results)},
            headers={"X-Goog-Api-Key": self._key},
            secret=self._key,
        )
        return reply if isinstance(reply, Failure) else _pages(reply)


def _pages(reply: JsonReply) -> list[FoundPage] | Failure:
    if reply.status in (401, 403) or (reply.status == 400 and "API key" in str(reply.value)):
        return Failure(reason=f"status {reply.status}: check {API_KEY_VARIABLE} and {ENGINE_VARIABLE}")
    if reply.status == 400:
        return Failure(reason="status 400", bad_query=True)
    if reply.status != 200:
        return Failure(reason=f"status {reply.status}")
    try:
        # Nothing found: the member `items` is left out.
        return [
            FoundPage(title=str(item["title"]), url=str(item["link"]), text=str(item.get("snippet", "")))
            for item in reply.value.get("items", [])
        ]
    except (LookupError, TypeError, AttributeError):
        return Failure(reason="an answer that is not the Programmable Search API's")
