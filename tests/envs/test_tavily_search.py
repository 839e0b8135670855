import asyncio
import contextlib
import json
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from configs.errors import UserError
from envs.http import ServiceLimits
from envs.tools.guard import BlockList
from envs.tools.web_search import TAVILY_KEY_VARIABLE as API_KEY_VARIABLE
from envs.tools.web_search import PageSearchTool, TavilyFinder
from envs.types import Tool, ToolUnavailableError

API_KEY = "tvly-secret-0123456789"


def quick(**settings):
    default = {"first_pause_s": 0.01, "attempt_limit_s": 3.0, "time_limit_s": 5.0, "requests_per_minute": 60_000}
    return ServiceLimits(**(default | settings))


def page(title="Copper", content="One crate of copper bolts weighs 47 kg."):
    return {"title": title, "url": "https://example.org", "content": content, "score": 0.9}


def found(*pages):
    return 200, {"query": "q", "results": list(pages), "response_time": 0.1}


def failed(status, message="no"):
    return status, {"detail": {"error": message}}


class FakeTavily:
    """A server on this machine that answers like the service, from a script; the last answer repeats."""

    def __init__(self, *answers, delay_s=0.0):
        self.requests = []
        self._answers = list(answers)
        self._delay_s = delay_s
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def _handler(self):
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.requests.append((self.path, self.headers["Authorization"], body))
                time.sleep(fake._delay_s)
                status, answer = fake._answers.pop(0) if len(fake._answers) > 1 else fake._answers[0]
                text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(text)

            def log_message(self, *_):
                pass

        return Handler


@pytest.fixture(autouse=True)
def _no_proxy_and_a_key(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(API_KEY_VARIABLE, API_KEY)


def search_tool(server, *, limits=None, **settings) -> Tool:
    finder = TavilyFinder(limits or quick(), base_url=server.url, **settings)
    return PageSearchTool("search", "search the web", finder, block_list=BlockList(["blocked.example"]), max_chars=1200)


async def ask(server, query="copper bolts", **settings):
    return await search_tool(server, **settings).call(query)


async def refusal(server, **settings) -> str:
    """What the caller can see of a failure: its message, and everything attached to it."""
    with pytest.raises(ToolUnavailableError) as caught:
        await ask(server, **settings)
    attached = (caught.value.__cause__, caught.value.__context__)
    return " ".join(map(str, (caught.value, *attached)))


async def test_the_pages_become_one_line_each():
    answer = found(page(), page(title="Rings", content="Copper\n  rings\tare round."))
    with FakeTavily(answer) as server:
        result = await ask(server)
    assert result.error is None
    assert result.text == ("Copper: One crate of copper bolts weighs 47 kg.\nRings: Copper rings are round.")


async def test_the_request_carries_the_key_the_query_and_the_excluded_hosts():
    with FakeTavily(found(page())) as server:
        await ask(server, "  copper bolts \n", excluded_hosts=("answers.example",))
    [(path, authorization, body)] = server.requests
    assert (path, authorization) == ("/search", f"Bearer {API_KEY}")
    assert body["query"] == "copper bolts"
    assert body["max_results"] == 3
    assert body["exclude_domains"] == ["answers.example"]


async def test_a_blocked_page_that_the_service_gives_all_the_same_is_left_out():
    blocked = page(title="Blocked") | {"url": "https://www.blocked.example/answers"}
    with FakeTavily(found(blocked, page())) as server:
        assert (await ask(server)).text == "Copper: One crate of copper bolts weighs 47 kg."


def test_no_key_stops_before_anything_starts(monkeypatch):
    monkeypatch.delenv(API_KEY_VARIABLE)
    with pytest.raises(UserError, match=r"set TAVILY_API_KEY .* or use envs\.search = 'offline'"):
        TavilyFinder(quick())


async def test_an_endless_answer_is_broken_off():
    with FakeTavily((200, b" " * 300_000)) as server:
        assert "more than 100000 bytes" in await refusal(server, limits=quick(max_bytes=100_000))
    assert len(server.requests) == 1


async def test_nothing_found_says_so():
    with FakeTavily(found()) as server:
        assert (await ask(server)).text == "No results."


@pytest.mark.parametrize("status", [429, 500, 502, 503])
async def test_a_passing_failure_is_tried_again(status):
    with FakeTavily(failed(status), failed(status), found(page())) as server:
        result = await ask(server)
    assert result.text.startswith("Copper:")
    assert len(server.requests) == 3


async def test_a_lasting_server_failure_makes_the_tool_unavailable():
    with FakeTavily(failed(500)) as server:
        message = await refusal(server)
    assert "failed 4 times, at last with status 500" in message
    assert len(server.requests) == 4


@pytest.mark.parametrize("status", [401, 403, 432, 433])
async def test_a_refused_key_is_not_tried_again(status):
    with FakeTavily(failed(status)) as server:
        message = await refusal(server)
    assert "refused the key in TAVILY_API_KEY" in message
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [302, 404, 418])
async def test_an_unexpected_status_is_not_tried_again(status):
    with FakeTavily(failed(status)) as server:
        assert f"status {status}" in await refusal(server)
    assert len(server.requests) == 1


async def test_a_rejected_query_is_the_callers_error():
    with FakeTavily(failed(400, "Query is too long")) as server:
        assert (await ask(server)).error == "bad_query"


async def test_an_empty_query_asks_nobody():
    with FakeTavily(found(page())) as server:
        assert (await ask(server, "  ")).error == "empty_query"
    assert server.requests == []


async def test_a_long_query_is_cut_to_what_the_service_takes():
    with FakeTavily(found(page())) as server:
        await ask(server, "copper " * 500)
    assert len(server.requests[0][2]["query"]) == 300


async def test_a_slow_server_is_given_up_after_the_attempts():
    settings = quick(first_pause_s=0.01, attempt_limit_s=0.05, max_attempts=2)
    with FakeTavily(found(page()), delay_s=0.3) as server:
        assert "failed 2 times, at last with no reply within 0.05 s" in await refusal(server, limits=settings)


async def test_the_time_limit_covers_all_attempts():
    settings = quick(time_limit_s=0.2, first_pause_s=0.0)
    with FakeTavily(failed(429), delay_s=0.15) as server:
        assert "no answer within 0.2 s" in await refusal(server, limits=settings)


async def test_no_server_makes_the_tool_unavailable():
    with FakeTavily(found()) as server:
        pass
    assert "failed 4 times, at last with no connection" in await refusal(server)


async def test_cancellation_passes_through():
    with FakeTavily(found(page()), delay_s=0.5) as server, pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await ask(server)


@pytest.mark.parametrize("answer", [b"not json", b"[]", b'{"results": null}', b'{"results": [1]}', b""])
async def test_a_malformed_answer_makes_the_tool_unavailable(answer):
    with FakeTavily((200, answer)) as server:
        assert "Tavily search failed with" in await refusal(server)


async def test_a_huge_page_is_cut_and_leaves_room_for_the_others():
    answer = found(page(content="copper " * 100_000), page(title="Second"), page(title="Third"))
    with FakeTavily(answer) as server:
        text = (await ask(server)).text
    assert len(text) <= 1200
    assert [line.split(":")[0] for line in text.splitlines()] == ["Copper", "Second", "Third"]


async def test_more_pages_than_asked_for_are_dropped():
    with FakeTavily(found(*[page()] * 20)) as server:
        assert len((await ask(server)).text.splitlines()) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500])
async def test_the_key_is_in_no_text_error_or_log(status, caplog):
    caplog.set_level(logging.DEBUG)
    with FakeTavily(failed(status, f"bad key {API_KEY}")) as server:
        try:
            seen = (await ask(server)).text
        except ToolUnavailableError as error:
            seen = f"{error!r} {error.__cause__!r} {error.__context__!r}"
    assert API_KEY not in seen
    assert API_KEY not in caplog.text


async def test_a_page_that_quotes_the_key_is_redacted():
    with FakeTavily(found(page(content=f"Bearer {API_KEY}"))) as server:
        assert (await ask(server)).text == "Copper: Bearer [key]"


def test_the_tool_does_not_print_its_key():
    assert API_KEY not in repr(TavilyFinder(quick()))
