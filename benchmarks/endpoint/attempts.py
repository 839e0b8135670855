"""Agents that do to an endpoint whatever agents do, over an engine of which every sampled id is written down."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from rollout.agent.own import GivenTask

from rollout.endpoint.attempt import Attempt
from rollout.endpoint.server import Endpoint
from rollout.engines.engine import Engine, GenerationRequest
from rollout.types import Completion

ADD: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
WORDS = (
    "the sum is",
    "naïve café",
    "12 + 34 = 46",
    "  hm …",
    "数える",
    "well,\n\n so",
    "0x1F",
    "\tindented",
    "🙂 ok",
    "é",
)
LEAVE_S = 0.05
"""What the news takes that a client has left, before a resend without a key."""


class Sampled(NamedTuple):
    """One call as the engine knows it."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str


class LoggingEngine:
    """Writes down what another engine samples before anybody else sees it. A `gate` holds an attempt's replies back."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.log: dict[str, list[Sampled]] = {}
        self.begun: Counter[str] = Counter()
        self.gates: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerationRequest) -> Completion:
        name = request.trajectory_id
        self.begun[name] += 1
        completion = await self._engine.generate(request)
        entry = Sampled(request.prompt_token_ids, completion.token_ids, completion.logprobs, completion.text)
        self.log.setdefault(name, []).append(entry)
        if name in self.gates:
            await self.gates[name].wait()
        return completion

    def release(self, trajectory_id: str) -> None:
        self._engine.release(trajectory_id)


class ScriptedSampler:
    """Says words, calls of functions and broken ones, in ids that a tokenizer would often not make of them."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)

    async def generate(self, request: GenerationRequest) -> Completion:
        await asyncio.sleep(self._rng.uniform(0, 0.02))
        ids = [*self._split(self._text(request.grammar)), self._tokenizer.eos_token_id]
        cut = len(ids) > request.max_tokens
        ids = ids[: request.max_tokens]
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(-self._rng.random() for _ in ids),
            text=self._tokenizer.decode(ids, skip_special_tokens=True),
            finish_reason="length" if cut else "stop",
            policy_version=0,
        )

    def release(self, trajectory_id: str) -> None:
        pass

    def _text(self, grammar: str | None) -> str:
        if grammar is not None:
            return self._calls(1) if "one_call" in grammar else '{"sum": 3}'
        words = " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, 6)))
        kind = self._rng.choice(("words", "words", "calls", "words and calls", "broken call"))
        if kind == "broken call":
            return f'{words} <tool_call>\n{{"name": "add", </tool_call>'
        calls = self._calls(self._rng.randint(1, 3))
        return {"words": words, "calls": calls}.get(kind, f"{words}\n{calls}")

    def _calls(self, count: int) -> str:
        numbers = [(self._rng.randint(0, 99), self._rng.randint(0, 99)) for _ in range(count)]
        return "\n".join(
            f'<tool_call>\n{{"name": "add", "arguments": {{"b": {b},"a": {a}}}}}\n</tool_call>' for a, b in numbers
        )

    def _split(self, text: str) -> list[int]:
        """Half of the texts are cut somewhere and each part is tokenised for itself, as sampling may have it."""
        at = sorted(self._rng.sample(range(len(text) + 1), k=min(3, len(text)))) if self._rng.random() < 0.5 else []
        parts = [text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True)]
        encode = self._tokenizer
        return [
            token
            for part in parts
            for token in encode(part, add_special_tokens=False, split_special_tokens=True).input_ids
        ]


@dataclass
class Doings:
    """What an attempt's client did and got. `received` are the ids of replies; `unequal` counts resends that brought
    another reply than the first, which a key or a header of theirs forbids."""

    received: set[str] = field(default_factory=set)
    lost: int = 0
    unequal: int = 0
    moves: Counter[str] = field(default_factory=Counter)


Reply = dict[str, Any]
"""A message, and the `id` of the reply that it came in."""


class AuditedAgent:
    """Makes `num_moves` moves, drawn anew for each attempt."""

    def __init__(self, engine: LoggingEngine, num_moves: int, seed: int, max_tokens: int) -> None:
        self._engine = engine
        self._num_moves = num_moves
        self._seed = seed
        self._max_tokens = max_tokens
        self._connections = DefaultAsyncHttpxClient(trust_env=False, limits=httpx.Limits(max_connections=None))
        self.doings: dict[str, Doings] = {}

    async def answer(self, task: GivenTask, attempt: Attempt, endpoint: Endpoint) -> str:
        client = AsyncOpenAI(
            base_url=endpoint.base_url, api_key=attempt.key, http_client=self._connections, max_retries=0, timeout=3600
        )
        doings = self.doings[task.id] = Doings()
        rng = random.Random(f"{self._seed}/{task.id}")
        await Play(client, self._engine, task, doings, rng, self._max_tokens).moves(self._num_moves)
        return "done"


class Play:
    """One attempt; `messages` are its main dialogue, `name` that of its trajectory."""

    def __init__(
        self,
        client: AsyncOpenAI,
        engine: LoggingEngine,
        task: GivenTask,
        doings: Doings,
        rng: random.Random,
        max_tokens: int,
    ) -> None:
        self._client = client
        self._engine = engine
        self._doings = doings
        self._rng = rng
        self._max_tokens = max_tokens
        self._name = task.id
        self._num_keys = 0
        self._question = {"role": "user", "content": f"{task.question} ({task.id})"}
        self.messages: list[Any] = [{"role": "system", "content": "You add."}, self._question]

    async def moves(self, number: int) -> None:
        kinds = (
            *(self.goes_on, self.goes_on, self.streams, self.resends_with_its_key, self.resends_at_once),
            *(self.retries_by_header, self.loses_a_reply_and_resends, self.loses_a_reply, self.edits, self.compacts),
            *(self.asks_sub_agents, self.asks_twice, self.wants_json, self.must_call),
        )
        for _ in range(number):
            move = self._rng.choice(kinds)
            self._doings.moves[move.__name__.replace("_", " ")] += 1
            await move()

    async def goes_on(self) -> None:
        self._take(await self._ask(self.messages))

    async def streams(self) -> None:
        self._take(await self._streamed(self.messages))

    async def resends_with_its_key(self) -> None:
        key = self._key()
        first = await self._ask(self.messages, headers=key)
        self._same(first, await self._ask(self.messages, headers=key))
        self._take(first)

    async def resends_at_once(self) -> None:
        key = self._key()
        first, second = await asyncio.gather(*(self._ask(self.messages, headers=key) for _ in range(2)))
        self._same(first, second)
        self._take(first)

    async def retries_by_header(self) -> None:
        first = await self._ask(self.messages)
        self._same(first, await self._ask(self.messages, headers={"x-stainless-retry-count": "1"}))
        self._take(first)

    async def loses_a_reply_and_resends(self) -> None:
        """With a key as often as not."""
        key, streams = self._key() if self._rng.random() < 0.5 else {}, self._rng.random() < 0.5
        await self._leave(key, streams)
        ask = self._streamed if streams else self._ask
        self._take(await ask(self.messages, headers=key))

    async def loses_a_reply(self) -> None:
        await self._leave(self._key(), self._rng.random() < 0.5)
        self._doings.lost += 1
        self.messages.append({"role": "user", "content": "Anew, please."})
        self._take(await self._ask(self.messages))

    async def edits(self) -> None:
        """Words that were never sampled take the place of an earlier reply."""
        replies = [at for at, message in enumerate(self.messages) if message["role"] == "assistant"]
        if replies:
            at = self._rng.choice(replies)
            self.messages = [*self.messages[:at], {"role": "assistant", "content": "I never said so."}]
        self.messages.append({"role": "user", "content": "What now?"})
        self._take(await self._ask(self.messages))

    async def compacts(self) -> None:
        summary = {"role": "user", "content": f"So far: {len(self.messages)} messages. Go on."}
        self.messages = [self.messages[0], self._question, summary]
        self._take(await self._ask(self.messages))

    async def asks_sub_agents(self) -> None:
        """Two at once, each with a dialogue of two exchanges."""
        found = await asyncio.gather(*(self._sub_agent(role) for role in ("critic", "helper")))
        self.messages.append({"role": "user", "content": f"Others say: {found!r}"})
        self._take(await self._ask(self.messages))

    async def _sub_agent(self, role: str) -> str:
        messages: list[Any] = [{"role": "system", "content": f"You are a {role}."}, self._question]
        first = await self._ask(messages, with_tools=False)
        second = await self._ask(
            [*messages, _without_id(first), {"role": "user", "content": "Shorter."}], with_tools=False
        )
        return str(second["content"])

    async def asks_twice(self) -> None:
        """Two equal requests at once are two samples; it goes on with one."""
        both = await asyncio.gather(*(self._ask(self.messages) for _ in range(2)))
        self._doings.unequal += both[0]["id"] == both[1]["id"]
        self._take(self._rng.choice(both))

    async def wants_json(self) -> None:
        await self._ask(self.messages, response_format={"type": "json_object"})

    async def must_call(self) -> None:
        self._take(await self._ask(self.messages, tool_choice="required"))

    def _take(self, reply: Reply) -> None:
        """The dialogue goes on: results of calls, or a further question."""
        self.messages.append(_without_id(reply))
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": _sum(call["function"]["arguments"])}
            for call in reply.get("tool_calls", ())
        ]
        self.messages += results or [{"role": "user", "content": f"And {self._rng.randint(0, 9)} more?"}]

    def _key(self) -> dict[str, str]:
        self._num_keys += 1
        return {"Idempotency-Key": str(self._num_keys)}

    def _same(self, first: Reply, second: Reply) -> None:
        self._doings.unequal += first["id"] != second["id"]

    def _body(self, messages: Sequence[Any], with_tools: bool, more: Mapping[str, Any]) -> dict[str, Any]:
        tools = {"tools": [ADD]} if with_tools else {}
        return {"model": "policy", "messages": [*messages], "max_tokens": self._max_tokens, **tools, **more}

    async def _ask(
        self, messages: Sequence[Any], *, headers: Mapping[str, str] | None = None, with_tools: bool = True, **more: Any
    ) -> Reply:
        body = self._body(messages, with_tools, more)
        reply = await self._client.chat.completions.create(**body, extra_headers=headers)
        self._doings.received.add(reply.id)
        return {"id": reply.id, **reply.choices[0].message.model_dump(exclude_none=True)}

    async def _streamed(self, messages: Sequence[Any], *, headers: Mapping[str, str] | None = None) -> Reply:
        body = self._body(messages, True, {"stream": True})
        stream = await self._client.chat.completions.create(**body, extra_headers=headers)
        chunks = [chunk async for chunk in stream]
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        self._doings.received.add(chunks[0].id)
        calls = [call.model_dump(exclude={"index"}) for delta in deltas for call in delta.tool_calls or ()]
        content = "".join(delta.content or "" for delta in deltas)
        return {"id": chunks[0].id, "role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})

    async def _leave(self, key: Mapping[str, str], streams: bool) -> None:
        """Ask, and go away while it is sampled."""
        gate = self._engine.gates[self._name] = asyncio.Event()
        before = self._engine.begun[self._name]
        body = self._body(self.messages, True, {"stream": True} if streams else {})
        headers = {"Authorization": f"Bearer {self._client.api_key}", **key}
        async with httpx.AsyncClient(trust_env=False, timeout=3600) as leaving:
            url = f"{self._client.base_url}chat/completions"
            asking = asyncio.ensure_future(leaving.post(url, json=body, headers=headers))
            while self._engine.begun[self._name] == before:  # noqa: ASYNC110 (nothing tells of it)
                await asyncio.sleep(0.002)
            asking.cancel()
            await asyncio.wait((asking,))
        await asyncio.sleep(LEAVE_S)
        del self._engine.gates[self._name]
        gate.set()


def _without_id(reply: Reply) -> dict[str, Any]:
    return {name: value for name, value in reply.items() if name != "id"}


def _sum(arguments: str) -> str:
    try:
        return str(sum(json.loads(arguments).values()))
    except (ValueError, TypeError, AttributeError):
        return "these are no numbers"
