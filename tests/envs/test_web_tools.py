"""Web search with Wikipedia, page reading and the base generator, over local servers."""

import json
from urllib.parse import parse_qs, urlsplit

import pytest

from configs.envs import EnvsConfig
from configs.errors import UserError
from configs.rollout import ServerConfig
from envs.tools.guard import BlockList
from envs.tools.http import RefusedError, ServiceLimits
from envs.tools.search import MAX_QUERY_CHARS, FoundPage, PageSearchTool, WebSearchTool, WikipediaFinder
from envs.tools.toolbox import BaseGeneratorTool, Toolbox, build_ask
from envs.tools.web_fetch import PageFetcher
from envs.types import ToolUnavailableError
from tests.envs.local_server import Answer, LocalServer, serving

LIMITS = ServiceLimits(first_pause_s=0.01, requests_per_minute=60_000, max_attempts=3, time_limit_s=5.0)


def json_answer(value, status=200, **headers):
    return Answer(status, {"Content-Type": "application/json"} | headers, json.dumps(value).encode())


def parameters(request):
    return {name: values[0] for name, values in parse_qs(urlsplit(request.path).query).items()}


# Wikipedia: https://www.mediawiki.org/wiki/API:Search, Extension:TextExtracts

WIKI = {
    "batchcomplete": True,
    "query": {
        "pages": [
            {"pageid": 2, "title": "Bolt", "index": 2, "extract": "A bolt.", "fullurl": "https://w.org/Bolt"},
            {"pageid": 1, "title": "Copper", "index": 1, "extract": "A\nmetal.", "fullurl": "https://w.org/Cu"},
        ]
    },
}


async def wikipedia(server, query="copper bolts"):
    return await WikipediaFinder(LIMITS, base_url=f"{server.url}/w/api.php").find(query)


async def test_wikipedia_gets_a_full_text_search_whose_pages_come_in_its_order():
    with serving(json_answer(WIKI)) as server:
        found = await wikipedia(server)
    assert [page.title for page in found] == ["Copper", "Bolt"]
    assert found[0] == FoundPage(title="Copper", url="https://w.org/Cu", text="A\nmetal.")
    [request] = server.requests
    assert (request.method, urlsplit(request.path).path) == ("GET", "/w/api.php")
    assert request.headers["User-Agent"].startswith("agentflow-ray/")
    sent = parameters(request)
    asked = {"action": "query", "generator": "search", "gsrsearch": "copper bolts", "gsrlimit": "3"}
    asked |= {"format": "json", "formatversion": "2", "exintro": "1", "explaintext": "1"}
    assert asked.items() <= sent.items()
    assert sent["prop"] == "extracts|info"
    with serving(json_answer({"batchcomplete": True})) as server:
        assert await wikipedia(server) == []


@pytest.mark.parametrize("code", ["maxlag", "ratelimited", "readonly", "cirrussearch-too-busy-error"])
async def test_an_overloaded_wiki_is_asked_again(code):
    with serving(json_answer({"error": {"code": code, "info": "wait"}}), json_answer(WIKI)) as server:
        assert len(await wikipedia(server)) == 2


async def test_a_query_that_the_wiki_refuses_is_the_callers_error():
    with (
        serving(json_answer({"error": {"code": "cirrussearch-regex-syntax-error", "info": "no"}})) as server,
        pytest.raises(RefusedError),
    ):
        await wikipedia(server)
    assert len(server.requests) == 1


# What a search shows


class ScriptedFinder:
    def __init__(self, *pages):
        self.pages = pages
        self.queries = []

    async def find(self, query):
        self.queries.append(query)
        return self.pages


def found(title, text, url="https://example.org/"):
    return FoundPage(title=title, url=url, text=text)


async def test_pages_of_blocked_hosts_and_with_held_out_questions_are_left_out():
    question = "How many crates of wool locks does the blue truck carry on its way to the harbour town?"
    block_list = BlockList(["blocked.example"], [question])
    finder = ScriptedFinder(
        found("A", "fine\n\tday"),
        found("B", "fine", "https://www.blocked.example/x"),
        found("C", f"Forum: {question.upper()} Answer: 35"),
    )
    search = PageSearchTool("s", "d", finder, block_list=block_list, max_chars=400)
    assert (await search.call("crates")).text == "A: fine day"


# Reading the web

ARTICLE = (
    "<html><head><title>Copper</title><script>var x = 'bolts';</script></head><body><nav>Home About</nav><article>"
    + "".join(f"<p>Paragraph {number} is about something else entirely.</p>" for number in range(30))
    + "<p>Copper bolts melt at 1085 degrees, as smiths know.</p></article></body></html>"
)


def reading(server, *pages, questions=()):
    block_list = BlockList((), questions)
    limits = ServiceLimits(max_attempts=1, requests_per_minute=60_000)
    fetcher = PageFetcher(limits, block_list=block_list, allowed_hosts=[server.host_port])
    finder = ScriptedFinder(*pages)
    return WebSearchTool(fetcher, finder, block_list=block_list, max_chars=400), finder


def html(text):
    return Answer(headers={"Content-Type": "text/html"}, body=text.encode())


@pytest.mark.parametrize(
    "form",
    [
        "url: {} When do copper bolts melt?",
        "URL:{}| query: When do copper bolts melt?",
        "When do copper bolts melt? {}",
        "url: <{}>\nWhen do copper bolts melt?",
    ],
)
async def test_the_best_passages_of_a_named_page_are_shown(form):
    with serving(html(ARTICLE)) as server:
        tool, finder = reading(server)
        result = await tool.call(form.format(f"{server.url}/copper"))
    assert server.requests[0].path == "/copper"
    assert "Copper bolts melt at 1085 degrees" in result.text.splitlines()[0]
    assert "var x" not in result.text
    assert len(result.text) <= 400
    assert finder.queries == []


async def test_a_question_reads_the_found_pages_or_else_their_extracts():
    with LocalServer(lambda request: html(ARTICLE) if request.path == "/a" else Answer(404)) as server:
        tool, finder = reading(
            server,
            found("Smithing", "snippet", f"{server.url}/a"),
            found("Gone", "Copper bolts were once melted here.", f"{server.url}/b"),
        )
        result = await tool.call("When do copper bolts melt?")
    assert finder.queries == ["When do copper bolts melt?"]
    assert "Smithing: Copper bolts melt at 1085 degrees" in result.text or "melt at 1085" in result.text
    assert "Gone: Copper bolts were once melted here." in result.text


async def test_a_page_with_a_held_out_question_is_refused():
    question = "At how many degrees do the copper bolts of the old bridge melt when the fire is hot?"
    with serving(html(f"<p>{question}</p><p>Answer: 1085</p>")) as server:
        tool, _ = reading(server, questions=[question])
        result = await tool.call(f"url: {server.url} copper")
    assert (result.error, "1085" in result.text) == ("blocked", False)


@pytest.mark.parametrize("address", ["file:///etc/passwd", "ftp://127.0.0.1/x", "javascript://x"])
async def test_an_address_with_another_scheme_is_refused_and_not_searched_for(address):
    with serving(html("x")) as server:
        tool, finder = reading(server)
        result = await tool.call(f"{address} secrets")
    assert (result.error, finder.queries) == ("bad_url", [])


@pytest.mark.parametrize("part", ["a.", "1a-", "a:/"])
async def test_a_long_question_is_scanned_once_for_an_address(part):
    """Regression: quadratic scanning blocked the event loop for hours."""
    with serving(html(ARTICLE)) as server:
        tool, finder = reading(server)
        await tool.call(part * 1_000_000)
    assert finder.queries == [(part * 1_000_000)[:MAX_QUERY_CHARS]]


def test_tools_share_one_service_and_its_pace():
    actions = ("wikipedia_search", "web_search", "answer")
    with Toolbox(EnvsConfig(actions=actions)) as toolbox, toolbox.episode() as tools:
        one, other = (tool._tool._tool._finder for tool in tools[:2])
    assert one is other
    assert one._service.limits.requests_per_minute == 60


# A frozen model


async def test_the_base_generator_asks_an_openai_compatible_server(monkeypatch):
    monkeypatch.setenv("BASE_KEY", "sk-secret")
    reply = {"choices": [{"message": {"role": "assistant", "content": " Copper. "}}]}
    with serving(Answer(500), json_answer(reply)) as server:
        config = ServerConfig(base_url=f"{server.url}/v1", model="m", api_key_env="BASE_KEY")
        result = await BaseGeneratorTool(build_ask(config, LIMITS, None)).call("Which metal is red?")
    assert (result.text, result.error) == ("Copper.", None)
    request = server.requests[-1]
    assert (request.path, request.headers["Authorization"]) == ("/v1/chat/completions", "Bearer sk-secret")
    assert json.loads(request.body) == {
        "model": "m",
        "messages": [{"role": "user", "content": "Which metal is red?"}],
        "temperature": 0,
        "max_tokens": 128,
    }


async def test_the_base_generator_asks_the_runs_own_model():
    async def own(prompt):
        return f"{prompt}!"

    tool = BaseGeneratorTool(build_ask(None, LIMITS, own))
    assert (await tool.call("Red")).text == "Red!"
    with pytest.raises(UserError, match=r"envs\.base_generator"):
        build_ask(None, LIMITS, None)


@pytest.mark.parametrize("reply", [{}, {"choices": []}, {"choices": [{"message": None}]}, []])
async def test_a_server_without_a_completion_is_unavailable(reply):
    with serving(json_answer(reply)) as server:
        config = ServerConfig(base_url=server.url, model="m")
        with pytest.raises(ToolUnavailableError):
            await build_ask(config, LIMITS, None)("x")
