import asyncio
import json
import logging
import time

import pytest
from pydantic import ValidationError

from configs.api_keys import ApiKeyError
from configs.reward import JudgeConfig
from reward import judge_client
from reward.judge_client import Bill, BudgetExceededError, ChatClient, ChatError
from tests.reward.chat_server import Answer, FakeChatServer, completion, judge_config, says

KEY_VARIABLE = "TEST_JUDGE_KEY"
API_KEY = "sk-secret-0123456789"
PROMPT = [{"role": "user", "content": "x" * 400}]


def client_of(server, **settings):
    return ChatClient(judge_config(server, **settings), section="label.judge")


async def ask(server, **settings):
    return await client_of(server, **settings).complete(PROMPT)


async def failure(server, **settings):
    with pytest.raises(ChatError) as caught:
        await ask(server, **settings)
    return caught.value


def everything_in(error):
    """Text of an error and of everything attached to it."""
    return " ".join(f"{part} {part!r}" for part in (error, error.__cause__, error.__context__))


async def test_a_request_carries_the_model_the_limits_and_the_key(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, f" {API_KEY}\n")
    with FakeChatServer() as server:
        reply = await ask(server, api_key_env=KEY_VARIABLE, num_votes=1, max_output_tokens=64)
    assert reply.text == "fine"
    [request] = server.requests
    path, authorization, body = request.path, request.headers["authorization"], json.loads(request.body)
    assert (path, authorization) == ("/v1/chat/completions", f"Bearer {API_KEY}")
    assert body == {"model": "judge-1", "messages": PROMPT, "temperature": 0.0, "max_tokens": 64}


async def test_no_key_is_sent_unless_the_configuration_names_one(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", API_KEY)
    with FakeChatServer() as server:
        await ask(server)
    assert "authorization" not in map(str.lower, server.requests[0].headers)


async def test_tokens_are_counted_and_priced_and_unknown_ones_at_their_bound():
    # 1000 read at $2 and 100 written at $10 per million: 0.002 + 0.001.
    with FakeChatServer() as server:
        reply = await ask(server, price_per_million_input_tokens=2, price_per_million_output_tokens=10)
    assert reply.bill == Bill(requests=1, input_tokens=1000, output_tokens=100, cost_usd=pytest.approx(0.003))
    with FakeChatServer(Answer({**completion(), "usage": None})) as server:
        reply = await ask(server, max_output_tokens=50)
    assert (reply.bill.input_tokens, reply.bill.output_tokens) == (100, 50)


@pytest.mark.parametrize("broken", [Answer(status=429), Answer(status=503), Answer(cut=True), Answer(delay_s=3.0)])
async def test_a_transient_failure_is_retried_and_charged_at_its_bound(monkeypatch, broken):
    monkeypatch.setattr(judge_client, "REQUEST_TIMEOUT_S", 1.0)
    with FakeChatServer(broken, says("at last")) as server:
        reply = await ask(server, max_output_tokens=50)
    assert (reply.text, len(server.requests)) == ("at last", 2)
    # The lost attempt may be billed: its bound is 100 + 50 tokens.
    assert reply.bill == Bill(requests=2, input_tokens=1100, output_tokens=150)


@pytest.mark.parametrize(
    "broken",
    [Answer(b""), Answer(b"<html>busy</html>"), Answer([]), Answer({"choices": []}), Answer({"error": "busy"})],
    ids=lambda answer: repr(answer.body[:12]),
)
async def test_a_reply_that_is_not_a_completion_is_an_error(broken):
    with FakeChatServer(broken) as server:
        error = await failure(server, max_retries=0)
    assert not error.lasting


@pytest.mark.parametrize(
    ("status", "setting"), [(401, "api_key_env"), (402, "balance"), (403, "judge.model"), (404, "judge.model")]
)
async def test_a_lasting_refusal_is_not_retried(status, setting):
    with FakeChatServer(Answer({"error": "no"}, status=status)) as server:
        error = await failure(server)
    assert error.lasting
    assert setting in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        Answer({"error": f"Incorrect key: {API_KEY}"}, status=400),
        Answer({"error": {"message": API_KEY}}, status=401),
        Answer({"error": API_KEY}, status=500),
        Answer(API_KEY.encode()),
        Answer(cut=True),
        Answer(delay_s=0.5),
    ],
    ids=["400", "401", "500", "prose", "cut", "slow"],
)
async def test_the_key_is_in_no_error_repr_or_log(monkeypatch, caplog, answer):
    monkeypatch.setenv(KEY_VARIABLE, API_KEY)
    monkeypatch.setattr(judge_client, "REQUEST_TIMEOUT_S", 0.25)
    caplog.set_level(logging.INFO)
    with FakeChatServer(answer) as server:
        client = client_of(server, api_key_env=KEY_VARIABLE, max_retries=0)
        with pytest.raises(ChatError) as caught:
            await client.complete(PROMPT)
    assert API_KEY not in everything_in(caught.value) + repr(client) + caplog.text


def test_a_missing_key_stops_before_the_first_request(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, " ")
    with pytest.raises(ApiKeyError, match=KEY_VARIABLE):
        client_of("http://127.0.0.1:9/v1", api_key_env=KEY_VARIABLE)


async def test_parallel_requests_are_bounded():
    active, seen = [], []

    def answer(_):
        active.append(1)
        seen.append(len(active))
        time.sleep(0.15)
        active.pop()
        return Answer()

    with FakeChatServer(answer) as server:
        client = client_of(server, max_concurrency=3)
        await asyncio.gather(*(client.complete(PROMPT) for _ in range(6)))
    assert (max(seen), len(seen)) == (3, 6)


PRICED = {
    "price_per_million_input_tokens": 10_000,
    "price_per_million_output_tokens": 10_000,
    "max_output_tokens": 100,
    "max_retries": 0,
}
"""The bound of a request is 100 prompt tokens and 100 written ones: $2."""


async def test_parallel_requests_do_not_exceed_the_budget():
    with FakeChatServer(Answer(completion(read=100, written=100), delay_s=0.05)) as server:
        client = client_of(server, **PRICED, max_cost_usd=5.0)
        outcomes = await asyncio.gather(*(client.complete(PROMPT) for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(outcome, BudgetExceededError) for outcome in outcomes) == 6
    assert len(server.requests) == 2
    assert client.spent.cost_usd == pytest.approx(4.0)


async def test_a_cancelled_request_is_charged_at_its_bound():
    with FakeChatServer(Answer(delay_s=0.3)) as server:
        client = client_of(server, max_output_tokens=50, max_retries=0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.complete(PROMPT), 0.1)
    assert client.spent == Bill(requests=1, input_tokens=100, output_tokens=50)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_votes": 2},
        {"max_cost_usd": float("nan")},
        {"base_url": "https://host/v1", "api_key_env": "KEY", "price_per_million_input_tokens": 1},
    ],
    ids=str,
)
def test_an_unsafe_configuration_is_rejected(settings):
    with pytest.raises(ValidationError):
        JudgeConfig(**{"model": "judge-1", **settings})
