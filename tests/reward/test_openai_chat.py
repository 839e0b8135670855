import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import ValidationError

from configs.api_keys import ApiKeyError
from configs.reward import JudgeConfig, StepJudgeConfig
from reward.openai_chat import Bill, BudgetExceededError, ChatClient, ChatError

KEY_VARIABLE = "TEST_JUDGE_KEY"
API_KEY = "sk-secret-0123456789"
ASKED = [{"role": "user", "content": "x" * 400}]


def completion(text="fine", *, read=1000, written=100):
    """A reply as the protocol has it."""
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return {"id": "c1", "object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": usage}


class Answer:
    """One scripted answer. `cut` sends only the first half of the body; `delay_s` waits before it."""

    def __init__(self, body=None, *, status=200, headers=(), delay_s=0.0, cut=False):
        self.status, self.headers, self.delay_s, self.cut = status, dict(headers), delay_s, cut
        body = completion() if body is None else body
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()


def says(text, **usage):
    return Answer(completion(text, **usage))


class FakeChatServer:
    """A server on this machine that speaks the chat-completions protocol from a script.

    The last answer repeats. A callable among the answers is given the request's body.
    """

    def __init__(self, *answers, port=0):
        self.requests = []
        self.under_way = self.most_under_way = 0
        self._answers = list(answers) or [Answer()]
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    @property
    def prompts(self):
        return [body["messages"][-1]["content"] for _, _, body in self.requests]

    def _answer(self, path, authorization, body):
        with self._lock:
            self.requests.append((path, authorization, body))
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return answer(body) if callable(answer) else answer

    def _left(self):
        with self._lock:
            self.under_way -= 1

    def _handler(self):
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = fake._answer(self.path, self.headers["Authorization"], body)
                time.sleep(answer.delay_s)
                fake._left()
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(answer.body)))
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer.body[: len(answer.body) // 2] if answer.cut else answer.body)

            def log_message(self, *_):
                pass

            def handle(self):
                # A client that ran into its time limit has left.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    super().handle()

        return Handler


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def config(server, **settings):
    url = server if isinstance(server, str) else server.url
    return StepJudgeConfig(**{"base_url": url, "model": "judge-1", "requests_per_minute": 1_000_000, **settings})


class Pauses(list):
    """A clock's sleep that only takes notes, of the pauses long enough to be meant."""

    async def __call__(self, seconds):
        if seconds > 0.001:
            self.append(seconds)
        await asyncio.sleep(0)


def client_of(server, *, pauses=None, **settings):
    return ChatClient(config(server, **settings), section="label.judge", sleep=Pauses() if pauses is None else pauses)


async def ask(server, **settings):
    return await client_of(server, **settings).complete(ASKED)


async def failure(server, **settings):
    with pytest.raises(ChatError) as caught:
        await ask(server, **settings)
    return caught.value


def visible(error):
    """What a caller can see of a failure: itself, and everything attached to it."""
    return " ".join(f"{part} {part!r}" for part in (error, error.__cause__, error.__context__))


def closed_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


async def test_a_request_carries_the_model_the_limits_and_the_key(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, f" {API_KEY}\n")
    with FakeChatServer() as server:
        reply = await ask(server, api_key_env=KEY_VARIABLE, temperature=0.5, max_output_tokens=64)
    assert reply.text == "fine"
    [(path, authorization, body)] = server.requests
    assert (path, authorization) == ("/v1/chat/completions", f"Bearer {API_KEY}")
    assert body == {"model": "judge-1", "messages": ASKED, "temperature": 0.5, "max_tokens": 64, "stream": False}


async def test_no_key_is_sent_unless_the_configuration_names_one(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", API_KEY)
    with FakeChatServer() as server:
        await ask(server)
    assert server.requests[0][1] is None


async def test_tokens_are_read_and_priced():
    # 1000 read at $2 and 100 written at $10 a million: 0.002 + 0.001.
    with FakeChatServer() as server:
        reply = await ask(server, price_per_million_input_tokens=2, price_per_million_output_tokens=10)
    assert reply.bill == Bill(requests=1, input_tokens=1000, output_tokens=100, cost_usd=pytest.approx(0.003))


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": -1, "completion_tokens": 5}, "many"])
async def test_a_reply_without_usable_usage_is_charged_at_its_bound(usage):
    with FakeChatServer(Answer({**completion(), "usage": usage})) as server:
        reply = await ask(server, max_output_tokens=50)
    assert (reply.bill.input_tokens, reply.bill.output_tokens) == (100, 50)


@pytest.mark.parametrize("content", ["", None])
async def test_an_empty_completion_is_a_reply(content):
    with FakeChatServer(says(content)) as server:
        assert (await ask(server)).text == ""


async def test_a_slow_reply_meets_the_time_limit_and_is_asked_for_again():
    with FakeChatServer(Answer(delay_s=20.0), says("at last")) as server:
        reply = await ask(server, request_timeout_s=2.0, max_output_tokens=50)
    assert reply.text == "at last"
    assert len(server.requests) == 2
    # The lost attempt may have been billed: its bound is 100 + 50 tokens.
    assert reply.bill == Bill(requests=2, input_tokens=1100, output_tokens=150)


@pytest.mark.parametrize(
    "broken",
    [
        Answer(status=429),
        Answer(status=500),
        Answer(status=503),
        Answer(cut=True),
        Answer(b""),
        Answer(b"<html>busy</html>"),
        Answer([]),
        Answer({"choices": []}),
        Answer({"choices": [{"message": None}]}),
        Answer({"error": "busy"}),
    ],
    ids=lambda answer: f"{answer.status}-{answer.body[:12]!r}-{answer.cut}",
)
async def test_a_passing_failure_is_tried_again(broken):
    with FakeChatServer(broken, broken, says("at last")) as server:
        assert (await ask(server)).text == "at last"
    assert len(server.requests) == 3


async def test_a_lasting_failure_is_retryable_later():
    with FakeChatServer(Answer(status=500)) as server:
        error = await failure(server, max_retries=2)
    assert not error.lasting
    assert "status 500" in str(error)
    assert len(server.requests) == 3


async def test_nobody_listening_says_what_to_check():
    error = await failure(f"http://127.0.0.1:{closed_port()}/v1", max_retries=1)
    assert not error.lasting
    assert "check label.judge.base_url and that the server runs" in str(error)
    assert error.bill == Bill(requests=2)


async def test_the_pauses_double_with_jitter():
    pauses = Pauses()
    with FakeChatServer(Answer(status=500)) as server:
        await failure(server, pauses=pauses, max_retries=3)
    assert [low <= pause <= 1.5 * low for pause, low in zip(pauses, (1, 2, 4), strict=True)] == [True] * 3


@pytest.mark.parametrize("status", [429, 503])
async def test_the_pause_that_the_server_asks_for_is_kept(status):
    pauses = Pauses()
    with FakeChatServer(Answer(status=status, headers={"Retry-After": "7"}), Answer()) as server:
        await ask(server, pauses=pauses)
    assert pauses == [7.0]


async def test_a_pause_may_be_asked_for_as_a_date():
    pauses, then = Pauses(), format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    with FakeChatServer(Answer(status=429, headers={"Retry-After": then}), Answer()) as server:
        await ask(server, pauses=pauses)
    assert len(pauses) == 1
    assert 25 < pauses[0] <= 30


@pytest.mark.parametrize("asked", ["soon", "nan", "-5", ""])
async def test_a_pause_that_cannot_be_read_is_the_usual_one(asked):
    pauses = Pauses()
    with FakeChatServer(Answer(status=429, headers={"Retry-After": asked}), Answer()) as server:
        await ask(server, pauses=pauses)
    assert 1 <= pauses[0] <= 1.5


@pytest.mark.parametrize("asked", ["3600", "inf"])
async def test_an_hours_pause_is_not_waited_for(asked):
    with FakeChatServer(Answer(status=429, headers={"Retry-After": asked})) as server:
        assert not (await failure(server)).lasting
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "advice"),
    [(401, "set a valid key"), (402, "top up"), (403, "no access"), (404, "judge.model"), (302, "judge.model")],
)
async def test_a_refusal_that_every_request_would_meet_is_not_tried_again(status, advice):
    with FakeChatServer(Answer({"error": "no"}, status=status)) as server:
        error = await failure(server)
    assert error.lasting
    assert advice in str(error)
    assert "\n" not in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_request_that_is_refused_quotes_the_server(status):
    with FakeChatServer(Answer({"error": {"message": "Model Not Exist\n" + "x" * 900}}, status=status)) as server:
        error = await failure(server)
    assert not error.lasting
    assert "Model Not Exist" in str(error)
    assert len(str(error)) < 400
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        Answer({"error": f"Incorrect key: {API_KEY}"}, status=400),
        Answer({"error": f"Incorrect key: {API_KEY}"}, status=401),
        Answer({"error": API_KEY}, status=500),
        Answer(API_KEY.encode()),
        Answer(cut=True),
        Answer(delay_s=0.3),
    ],
    ids=["400", "401", "500", "prose", "cut", "slow"],
)
async def test_the_key_is_in_no_error_repr_or_log(monkeypatch, caplog, answer):
    monkeypatch.setenv(KEY_VARIABLE, API_KEY)
    caplog.set_level(logging.DEBUG)
    with FakeChatServer(answer) as server:
        client = client_of(server, api_key_env=KEY_VARIABLE, max_retries=1, request_timeout_s=0.15)
        with pytest.raises(ChatError) as caught:
            await client.complete(ASKED)
    assert API_KEY not in visible(caught.value) + repr(client) + repr(client.meter) + caplog.text


async def test_a_key_from_a_file_is_in_no_error_either(monkeypatch, tmp_path):
    (tmp_path / "key").write_text(f"{API_KEY}\n")
    monkeypatch.setenv(f"{KEY_VARIABLE}_FILE", str(tmp_path / "key"))
    with FakeChatServer(Answer({"error": f"Incorrect key: {API_KEY}"}, status=400)) as server:
        error = await failure(server, api_key_env=KEY_VARIABLE)
    assert server.requests[0][1] == f"Bearer {API_KEY}"
    assert "Incorrect key: [key]" in str(error)
    assert API_KEY not in visible(error)


async def test_a_reply_that_is_too_large_is_no_completion_and_is_charged_at_its_bound():
    with FakeChatServer(Answer(b" " * (5 * 2**20))) as server:
        error = await failure(server, max_retries=0, max_output_tokens=50)
    assert "status 200 with more than 4194304 bytes" in str(error)
    assert not error.lasting
    assert error.bill == Bill(requests=1, input_tokens=100, output_tokens=50)


def test_a_named_but_empty_key_stops_before_anything_starts(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, " ")
    with pytest.raises(ApiKeyError, match=f"set {KEY_VARIABLE}"):
        client_of("http://127.0.0.1:9/v1", api_key_env=KEY_VARIABLE)


@pytest.mark.parametrize("key", ["sk-é", "sk-1\nsk-2", "sk 1"])
def test_a_key_that_no_header_can_carry_is_refused_unquoted(monkeypatch, key):
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(ApiKeyError, match="a character that no key has") as caught:
        client_of("http://127.0.0.1:9/v1", api_key_env=KEY_VARIABLE)
    assert "sk" not in visible(caught.value)


async def test_no_more_requests_are_under_way_than_allowed():
    with FakeChatServer(Answer(delay_s=0.15)) as server:
        client = client_of(server, max_concurrency=2)
        await asyncio.gather(*(client.complete(ASKED) for _ in range(6)))
    assert server.most_under_way == 2
    assert len(server.requests) == 6


async def test_requests_start_no_faster_than_the_rate():
    pauses = Pauses()
    with FakeChatServer() as server:
        client = client_of(server, pauses=pauses, requests_per_minute=6)
        await asyncio.gather(*(client.complete(ASKED) for _ in range(3)))
    # The second start is one period of 10 s away, the third two.
    assert [round(pause, -1) for pause in sorted(pauses)] == [10, 20]


async def test_the_budget_stops_before_the_request():
    # A bound is 100 prompt tokens and 100 written at $10,000 a million: $2. A reply of 100 + 50 is billed $1.50.
    with FakeChatServer(says("ok", read=100, written=50)) as server:
        client = client_of(
            server,
            price_per_million_input_tokens=10_000,
            price_per_million_output_tokens=10_000,
            max_output_tokens=100,
            max_cost_usd=3.5,
        )
        await client.complete(ASKED)
        await client.complete(ASKED)
        with pytest.raises(
            BudgetExceededError, match=r"budget of \$3\.5.*\$3\.0000 spent.*raise label\.judge\.max_cost_usd"
        ):
            await client.complete(ASKED)
    assert len(server.requests) == 2
    assert client.meter.spent.cost_usd == pytest.approx(3.0)


async def test_requests_under_way_together_do_not_overshoot_the_budget():
    with FakeChatServer(Answer(completion(read=100, written=100), delay_s=0.05)) as server:
        client = client_of(
            server,
            price_per_million_input_tokens=10_000,
            price_per_million_output_tokens=10_000,
            max_output_tokens=100,
            max_cost_usd=5.0,
            max_concurrency=8,
        )
        outcomes = await asyncio.gather(*(client.complete(ASKED) for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(outcome, BudgetExceededError) for outcome in outcomes) == 6
    assert len(server.requests) == 2
    assert client.meter.spent.cost_usd == pytest.approx(4.0)


async def test_a_cancelled_request_is_charged_at_its_bound():
    with FakeChatServer(Answer(delay_s=0.3)) as server:
        client = client_of(server, max_output_tokens=50)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.complete(ASKED), 0.1)
    assert client.meter.spent == Bill(requests=1, input_tokens=100, output_tokens=50)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_votes": 2},
        {"temperature": 0},
        {"max_spread": 1.1},
        {"max_cost_usd": float("nan")},
        {"base_url": "ftp://host/v1"},
        {"base_url": "https://user:word@host/v1"},
        {"base_url": "https://host/v1?key=1"},
        {"base_url": "http://host/v1", "api_key_env": "KEY"},
        {"base_url": "https://host/v1", "api_key_env": "KEY"},
        {"base_url": "https://host/v1", "api_key_env": "KEY", "price_per_million_input_tokens": 1},
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_meant_is_refused(settings):
    with pytest.raises(ValidationError):
        JudgeConfig(**{"model": "judge-1", **settings})


def test_a_configuration_for_a_billed_server_is_accepted():
    prices = {"price_per_million_input_tokens": 0.3, "price_per_million_output_tokens": 0.5}
    judge = JudgeConfig(base_url="https://api.example.com/v1/", model="judge-1", api_key_env="KEY", **prices)
    assert judge.base_url == "https://api.example.com/v1"


def test_one_vote_may_be_taken_at_temperature_0():
    assert JudgeConfig(model="judge-1", num_votes=1, temperature=0).temperature == 0
