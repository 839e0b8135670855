"""The model endpoint: an unchanged client asks, and what was sampled is what is recorded, token by token."""

import asyncio
import json

import httpx
import openai
import pytest
from endpoint_play import ADD, GatedEngine, OddEngine, called, play, until, user
from scripted import text_of

from rollout.engines.engine import EngineError


async def test_a_reply_comes_back_with_its_usage_and_is_a_turn_with_the_engines_ids():
    async with play("4") as p:
        reply = await p.ask({"role": "system", "content": "Be brief."}, user("2+2?"))
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("4", "stop")
        prompt = "<s>system:Be brief.<e><s>user:2+2?<e><s>assistant:"
        (turn,) = await p.attempt.end()
        assert text_of(turn.prompt_token_ids) == prompt
        assert text_of(turn.token_ids) == "4<e>"
        assert (turn.trainable, turn.role, turn.grammar) == (True, "planner", None)
        assert reply.usage.prompt_tokens == len(turn.prompt_token_ids)
        assert (reply.usage.completion_tokens, reply.usage.total_tokens) == (2, len(turn.prompt_token_ids) + 2)


async def test_a_conversation_goes_on_from_the_ids_that_were_sampled_not_from_its_text():
    async with play(engine=OddEngine(["4", "5"])) as p:
        first = await p.ask(user("2+2?"))
        await p.ask(user("2+2?"), {"role": "assistant", "content": first.choices[0].message.content}, user("+1?"))
        one, two = await p.attempt.end()
        assert one.token_ids == (901, ord("4"), 1)
        assert two.prompt_token_ids[: len(one.prompt_token_ids) + 3] == one.prompt_token_ids + one.token_ids
        assert text_of(two.prompt_token_ids[len(one.prompt_token_ids) + 3 :]) == "<s>user:+1?<e><s>assistant:"


async def test_a_reply_that_was_cut_gets_the_end_of_its_turn_in_the_next_prompt():
    async with play("4 and so on…", "5") as p:
        first = await p.ask(user("2+2?"), max_tokens=3)
        assert first.choices[0].finish_reason == "length"
        assert p.engine.requests[0].max_tokens == 3
        await p.ask(user("2+2?"), {"role": "assistant", "content": "4 and so on"}, user("+1?"))
        assert text_of(p.engine.requests[1].prompt_token_ids).endswith("4 and so on<e><s>user:+1?<e><s>assistant:")


async def test_edited_history_begins_a_branch_at_the_last_reply_that_it_left_as_it_was():
    async with play("a", "b", "c") as p:
        await p.ask(user("1"))
        said = [user("1"), {"role": "assistant", "content": "a"}]
        await p.ask(*said, user("2"))
        await p.ask(*said, {"role": "assistant", "content": "never said"}, user("3"))
        first, second, third = await p.attempt.end()
        own = first.prompt_token_ids + first.token_ids
        assert second.prompt_token_ids[: len(own)] == own == third.prompt_token_ids[: len(own)]
        assert text_of(third.prompt_token_ids[len(own) :]) == ("<s>assistant:never said<e><s>user:3<e><s>assistant:")


@pytest.mark.parametrize("order", [1, -1])
async def test_parallel_calls_of_functions_come_back_with_ids_and_their_results_go_on_from_the_sampled_text(order):
    async with play(called('{"a": 1}', '{"a":2}'), "3") as p:
        first = await p.ask(user("1+2?"), tools=[ADD])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        assert [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls] == [
            ("add", {"a": 1}),
            ("add", {"a": 2}),
        ]
        results = [
            {"role": "tool", "tool_call_id": one.id, "content": str(number)}
            for number, one in enumerate(message.tool_calls)
        ]
        await p.ask(user("1+2?"), message.model_dump(exclude_none=True), *results[::order], tools=[ADD])
        one, two = await p.attempt.end()
        own = one.prompt_token_ids + one.token_ids
        assert two.prompt_token_ids[: len(own)] == own
        assert text_of(two.prompt_token_ids[len(own) :]) == (
            "<s>user:<tool_response>\n0\n</tool_response>\n<tool_response>\n1\n</tool_response><e><s>assistant:"
        )
        assert (one.tool_call.name, one.tool_call.arguments) == ("add, add", '{"a": 1}\n{"a": 2}')
        assert one.tool_result.text == "0\n1"


async def test_a_stream_brings_the_same_message_in_pieces():
    async with play("four", called('{"a": 1}')) as p:
        stream = await p.ask(user("2+2?"), stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "four"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == 5
        stream = await p.ask(user("2+2?"), stream=True, tools=[ADD])
        pieces = [piece async for chunk in stream for piece in chunk.choices[0].delta.tool_calls or ()]
        assert [(piece.index, piece.function.name) for piece in pieces] == [(0, "add")]
        assert [turn.trainable for turn in await p.attempt.end()] == [True, True]


# --- what must fail loudly ----------------------------------------------------------------------


async def test_a_call_after_the_reward_is_refused_and_changes_nothing():
    async with play("a", "b") as p:
        await p.ask(user("1"))
        p.endpoint.dismiss(p.attempt)
        turns = await p.attempt.end()
        with pytest.raises(openai.AuthenticationError):
            await p.ask(user("2"))
        assert (len(turns), len(p.engine.requests)) == (1, 1)


async def test_a_retry_gets_the_same_reply_and_counts_once():
    async with play("a", "b") as p:
        first = await p.ask(user("1"))
        again = await p.ask(user("1"), extra_headers={"x-stainless-retry-count": "1"})
        assert again.choices[0].message.content == first.choices[0].message.content == "a"
        assert len(await p.attempt.end()) == 1


async def test_a_client_that_gave_up_waiting_and_asks_again_is_given_the_reply_that_it_did_not_get():
    async with play(engine=GatedEngine(["a", "b"])) as p:
        asked = asyncio.ensure_future(p.ask(user("1")))
        await until(lambda: p.engine.requests)
        asked.cancel()
        await until(lambda: p.attempt._calls[0].left)
        p.engine.gate.set()
        assert (await p.ask(user("1"))).choices[0].message.content == "a"
        (turn,) = await p.attempt.end()
        assert turn.trainable


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_its_client_never_got_is_kept_and_not_trained(stream):
    async with play(engine=GatedEngine(["a"])) as p:
        body = {"model": "policy", "messages": [user("1")], "stream": stream}
        headers = {"authorization": f"Bearer {p.attempt.key}"}
        async with httpx.AsyncClient(trust_env=False) as client:
            posted = client.post(f"{p.endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=60)
            asked = asyncio.ensure_future(posted)
            await until(lambda: p.engine.requests)
            asked.cancel()
        await until(lambda: p.attempt._calls[0].left)
        p.engine.gate.set()
        await p.attempt._calls[0].answered()
        (turn,) = await p.attempt.end()
        assert not turn.trainable


async def test_an_engine_that_fails_is_a_failure_of_the_server_and_is_remembered():
    async with play(EngineError("gone"), EngineError("gone")) as p:
        stream = await p.ask(user("1"), stream=True)
        with pytest.raises(openai.APIError, match="gone"):
            _ = [chunk async for chunk in stream]
        assert p.attempt.broken == "the engine failed: gone"
        assert await p.attempt.end() == []


async def test_a_lost_attempt_samples_no_more_however_often_its_client_retries():
    async with play(EngineError("gone"), "a", "a", "a") as p:
        patient = p.client_with(max_retries=3)
        for number in range(3):
            with pytest.raises(openai.APIStatusError, match="gone"):
                await patient.chat.completions.create(model="policy", messages=[user(str(number))])
        assert len(p.engine.requests) == 1
