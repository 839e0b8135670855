import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from scripted import decision

from configs.backend import OpenAiConfig
from rollout.agent.planner import planner_grammar, planner_schema
from rollout.engines.engine import BackendError, ContextFullError, EngineError, GenerationRequest
from rollout.engines.served import ChatServer, OpenAiEngine
from rollout.types import Message, TextCompletion

REPLY = decision("answer", "42")
ACTIONS = ("think", "answer")


def chat_completion(text, *, finish_reason="stop"):
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": "planner",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 61, "completion_tokens": 9, "total_tokens": 70},
    }


@contextmanager
def engine_over(status, reply, **settings):
    """An engine, and the `(path, body)` of every request that a server got which always answers the same."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def _do(self):
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen.append((self.path, json.loads(raw) if raw else None))
            content = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _do

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    config = OpenAiConfig(**({"model": "planner", "base_url": url, "max_retries": 0} | settings))
    try:
        yield OpenAiEngine(ChatServer(config), config, seed=5), seen
    finally:
        server.shutdown()
        server.server_close()


def request():
    return GenerationRequest(
        trajectory_id="t",
        prompt_token_ids=(),
        max_tokens=64,
        temperature=0.0,
        grammar=planner_grammar(ACTIONS),
        messages=(Message(role="system", content="Solve."), Message(role="user", content="6*7?")),
        json_schema=planner_schema(ACTIONS),
    )


PLAIN_BODY = {
    "model": "planner",
    "messages": [{"role": "system", "content": "Solve."}, {"role": "user", "content": "6*7?"}],
    "temperature": 0.0,
    "max_tokens": 64,
    "seed": 5,
    "stream": False,
}


async def test_the_form_of_a_reply_is_asked_for_as_a_strict_json_schema():
    with engine_over(200, chat_completion(REPLY)) as (engine, seen):
        completion = await engine.generate(request())
    schema = {"name": "decision", "strict": True, "schema": planner_schema(ACTIONS)}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    assert seen == [("/v1/chat/completions", PLAIN_BODY | form)]
    assert completion == TextCompletion(text=REPLY, finish_reason="stop", num_prompt_tokens=61, num_tokens=9)


async def test_vllm_is_given_the_planner_s_own_grammar_and_told_not_to_think_or_to_bend_what_it_samples():
    """Its server takes Qwen2.5's repetition_penalty of 1.05 from the model's folder, for greedy answers too."""
    with engine_over(200, chat_completion(REPLY), form="vllm_grammar") as (engine, seen):
        await engine.generate(request())
    form = {
        "structured_outputs": {"grammar": planner_grammar(ACTIONS)},
        "chat_template_kwargs": {"enable_thinking": False},
        "repetition_penalty": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
    }
    assert seen == [("/v1/chat/completions", PLAIN_BODY | form)]


@pytest.mark.parametrize("text", [f"<think>\n\n</think>\n\n{REPLY}", f"Six sevens.</think>{REPLY}"])
async def test_thinking_that_comes_with_the_text_is_taken_off(text):
    with engine_over(200, chat_completion(text)) as (engine, _):
        assert (await engine.generate(request())).text == REPLY


async def test_a_thought_that_never_ended_leaves_no_answer_and_counts_as_cut():
    with engine_over(200, chat_completion("<think>Six sev", finish_reason="length")) as (engine, _):
        completion = await engine.generate(request())
    assert (completion.text, completion.finish_reason) == ("", "length")


async def test_a_full_context_is_told_from_other_refusals():
    message = "This model's maximum context length is 1024 tokens. However, you requested 1100 tokens."
    with (
        engine_over(400, {"error": {"message": message, "code": 400}}) as (engine, _),
        pytest.raises(ContextFullError),
    ):
        await engine.generate(request())
    with (
        engine_over(400, {"error": {"message": "unknown field seed"}}) as (engine, _),
        pytest.raises(BackendError, match=r"unknown field seed.*check backend\.type and backend\.form"),
    ):
        await engine.generate(request())


@pytest.mark.parametrize(
    "reply",
    [{}, {"choices": []}, {"choices": ["x"]}, chat_completion(REPLY, finish_reason="content_filter")],
)
async def test_what_is_no_finished_completion_is_an_engine_fault(reply):
    with engine_over(200, reply) as (engine, _), pytest.raises(EngineError):
        await engine.generate(request())


async def test_a_model_that_the_server_does_not_list_is_refused_with_those_it_does():
    listed = {"object": "list", "data": [{"id": "a"}, {"id": "b"}]}
    with engine_over(200, listed) as (engine, _), pytest.raises(BackendError, match="no 'planner' but a, b"):
        await engine.check()
    with engine_over(200, listed, model="b") as (engine, seen):
        await engine.check()
    assert seen == [("/v1/models", None)]
