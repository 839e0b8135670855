"""An attempt behind a real endpoint, with a scripted engine: what tests of the endpoint begin with."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import anthropic
import openai
from scripted import ScriptedEngine, ScriptedTokenizer

from rollout.chat import ChatFormat
from rollout.endpoint.attempt import Attempt
from rollout.endpoint.request import Rules
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import EngineWriter
from rollout.engines.wrappers import ReplayEngine

RULES = Rules(model="policy", temperature=0.7, override=False, max_tokens=64, max_context_tokens=4000, max_calls=8)
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def user(text):
    return {"role": "user", "content": text}


def called(*arguments):
    """What the model samples where it calls `add`."""
    return "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {given}}}\n</tool_call>' for given in arguments)


async def until(happened):
    async with asyncio.timeout(60):
        while not happened():  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0.01)


class GatedEngine(ScriptedEngine):
    """Samples only once it may."""

    def __init__(self, texts):
        super().__init__(texts)
        self.gate = asyncio.Event()

    async def generate(self, request):
        completion = await super().generate(request)
        await self.gate.wait()
        return completion


class OddEngine(ScriptedEngine):
    """Samples ids that no tokenizer would make of its texts, with log-probs of their own."""

    async def generate(self, request):
        completion = await super().generate(request)
        ids = (900 + len(self.requests), *completion.token_ids)
        return replace(completion, token_ids=ids, logprobs=(-2.0, *completion.logprobs))


@dataclass
class Play:
    engine: ScriptedEngine
    endpoint: Endpoint
    attempt: Attempt
    client: openai.AsyncOpenAI

    async def ask(self, *messages, **more):
        return await self.client.chat.completions.create(model="policy", messages=list(messages), **more)

    def client_with(self, **more):
        return new_client(self.endpoint, **({"api_key": self.attempt.key} | more))


def new_client(endpoint, **more):
    connections = openai.DefaultAsyncHttpxClient(trust_env=False)
    return openai.AsyncOpenAI(**({"base_url": endpoint.base_url, "http_client": connections, "max_retries": 0} | more))


def anthropic_client(p):
    return anthropic.AsyncAnthropic(
        base_url=p.endpoint.base_url.removesuffix("/v1"),
        api_key=p.attempt.key,
        http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False),
        max_retries=0,
    )


def new_attempt(engine, rules=RULES, temperature=0.7, trajectory_id="g/0", recorded=None, guide=None):
    """`recorded`: turns of an attempt, and how many of them are repeated."""
    if recorded is not None:
        engine = ReplayEngine(engine, *recorded)
    writer = EngineWriter(engine, trajectory_id=trajectory_id, temperature=temperature)
    return Attempt(writer, ChatFormat(ScriptedTokenizer()), rules, guide=guide)


@asynccontextmanager
async def play(*texts, rules=RULES, engine=None, **more):
    engine = engine or ScriptedEngine(texts)
    attempt, endpoint = new_attempt(engine, rules, **more), Endpoint()
    endpoint.admit(attempt)
    async with new_client(endpoint, api_key=attempt.key) as client:
        yield Play(engine, endpoint, attempt, client)
    endpoint.close()
