"""What the model endpoint trains on, against what the engine sampled: an audit of both records, token by token.

    python -m benchmarks.endpoint_audit --turns 2000            # a scripted engine
    python -m benchmarks.endpoint_audit --turns 300 --real      # the demo model's engine

Agents do to the endpoint what agents do: retry, leave while a reply is sampled, edit their history, compact it,
call sub-agents, ask twice. The engine's log is written before the endpoint sees a completion. From the training samples
only the parts that the loss mask selects are read: each run of trained tokens must be one entry of the log, with its
prompt before it, its ids in order and its log-probs, and no entry may be trained twice.
"""

import argparse
import asyncio
import json
import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))

import httpx
import numpy as np
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from configs.rollout import RolloutConfig
from envs.types import Task
from learner.packing import samples_of
from learner.types import TrainingSample
from rollout.agent.custom import CustomAgent, GivenTask
from rollout.chat import ChatFormat
from rollout.endpoint.attempt import Attempt
from rollout.endpoint.request import Rules
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import engine_writers
from rollout.engines.engine import Engine, GenerationRequest
from rollout.types import Completion

TEMPERATURE = 1.0
MOVES_EACH = 8
LEAVE_S = 0.05
"""Time for the server to notice that a client has left."""
WORDS = ("the sum is", "naïve café", "12 + 34 = 46", "  hm …", "数える", "well,\n\n so", "0x1F", "\tindented", "🙂 ok")
ADD = {
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


class Sampled(NamedTuple):
    """One completion as the engine sampled it."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class LoggingEngine:
    """Logs what another engine samples. A gate in `gates` holds an attempt's replies back once they are logged."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.log: defaultdict[str, list[Sampled]] = defaultdict(list)
        self.gates: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerationRequest) -> Completion:
        name = request.trajectory_id
        completion = await self._engine.generate(request)
        entry = Sampled(request.prompt_token_ids, tuple(completion.token_ids), tuple(completion.logprobs))
        self.log[name].append(entry)
        if name in self.gates:
            await self.gates[name].wait()
        return completion

    def release(self, trajectory_id: str) -> None:
        self._engine.release(trajectory_id)


class ScriptedSampler:
    """Replies with words, calls and broken calls, in ids that a tokenizer would often not produce."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)

    async def generate(self, request: GenerationRequest) -> Completion:
        await asyncio.sleep(self._rng.uniform(0, 0.02))
        text, rng = self._text(request.grammar), self._rng
        # Half of the texts are cut somewhere and each part is tokenized separately.
        at = sorted(rng.sample(range(len(text) + 1), k=min(3, len(text)))) if rng.random() < 0.5 else []
        parts = [text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True)]
        ids = [token for part in parts for token in encode(self._tokenizer, part)] + [self._tokenizer.eos_token_id]
        cut = len(ids) > request.max_tokens
        ids = ids[: request.max_tokens]
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(-rng.random() for _ in ids),
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
        calls = self._calls(self._rng.randint(1, 3))
        broken = f'{words} <tool_call>\n{{"name": "add", </tool_call>'
        return self._rng.choice((words, words, calls, f"{words}\n{calls}", broken))

    def _calls(self, count: int) -> str:
        numbers = [(self._rng.randint(0, 99), self._rng.randint(0, 99)) for _ in range(count)]
        return "\n".join(
            f'<tool_call>\n{{"name": "add", "arguments": {{"b": {b},"a": {a}}}}}\n</tool_call>' for a, b in numbers
        )


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)


class Client:
    """The agent of one attempt: it makes random moves at the endpoint."""

    def __init__(self, client: AsyncOpenAI, engine: LoggingEngine, task: GivenTask, max_tokens: int, seed: int) -> None:
        self._client, self._engine, self._name, self._max_tokens = client, engine, task.id, max_tokens
        self._rng = random.Random(f"{seed}/{task.id}")
        self._question = {"role": "user", "content": f"{task.question} ({task.id})"}
        self._messages: list[Any] = [{"role": "system", "content": "You add."}, self._question]
        self.received: set[str] = set()
        self.unequal_resends = 0
        """Resends that returned another reply than the first request, or equal requests that shared one."""

    async def move(self) -> None:
        moves = (self.reply, self.reply, self.stream, self.retry, self.retry, self.leave, self.edit, self.compact)
        await self._rng.choice((*moves, self.call_sub_agents, self.ask_twice, self.force_call))()

    async def reply(self) -> None:
        self._take(await self._ask(self._messages))

    async def stream(self) -> None:
        self._take(await self._ask(self._messages, stream=True))

    async def retry(self) -> None:
        first = await self._ask(self._messages)
        second = await self._ask(self._messages, headers={"x-stainless-retry-count": "1"})
        self.unequal_resends += first["id"] != second["id"]
        self._take(first)

    async def leave(self) -> None:
        """Disconnect while a reply is sampled; then send the request again, or a different one."""
        gate = self._engine.gates[self._name] = asyncio.Event()
        before = len(self._engine.log[self._name])
        stream, headers = self._rng.random() < 0.5, {"Authorization": f"Bearer {self._client.api_key}"}
        body = self._body(self._messages) | ({"stream": True} if stream else {})
        async with httpx.AsyncClient(trust_env=False, timeout=3600) as leaving:
            url = f"{self._client.base_url}chat/completions"
            request = asyncio.ensure_future(leaving.post(url, json=body, headers=headers))
            while len(self._engine.log[self._name]) == before:  # noqa: ASYNC110 (there is no event to wait for)
                await asyncio.sleep(0.002)
            request.cancel()
            await asyncio.wait((request,))
        await asyncio.sleep(LEAVE_S)
        del self._engine.gates[self._name]
        gate.set()
        if self._rng.random() < 0.5:
            self._messages.append({"role": "user", "content": "Again, please."})
        self._take(await self._ask(self._messages, stream=stream))

    async def edit(self) -> None:
        """Replace an earlier reply by words that were never sampled."""
        replies = [at for at, message in enumerate(self._messages) if message["role"] == "assistant"]
        if replies:
            at = self._rng.choice(replies)
            self._messages = [*self._messages[:at], {"role": "assistant", "content": "I never said so."}]
        self._messages.append({"role": "user", "content": "What now?"})
        await self.reply()

    async def compact(self) -> None:
        summary = {"role": "user", "content": f"So far: {len(self._messages)} messages. Continue."}
        self._messages = [self._messages[0], self._question, summary]
        await self.reply()

    async def call_sub_agents(self) -> None:
        """Run two dialogues of two exchanges at once."""

        async def sub_agent(role: str) -> str:
            messages = [{"role": "system", "content": f"You are a {role}."}, self._question]
            first = await self._ask(messages, tools=False)
            shorter = {"role": "user", "content": "Shorter."}
            return str((await self._ask([*messages, without_id(first), shorter], tools=False))["content"])

        replies = await asyncio.gather(*map(sub_agent, ("critic", "helper")))
        self._messages.append({"role": "user", "content": f"Others say: {replies!r}"})
        await self.reply()

    async def ask_twice(self) -> None:
        """Send two equal requests at once: they are two samples."""
        both = await asyncio.gather(*(self._ask(self._messages) for _ in range(2)))
        self.unequal_resends += both[0]["id"] == both[1]["id"]
        self._take(self._rng.choice(both))

    async def force_call(self) -> None:
        await self._ask(self._messages, response_format={"type": "json_object"})
        self._take(await self._ask(self._messages, tool_choice="required"))

    def _take(self, reply: dict[str, Any]) -> None:
        """Append the reply and the results of its calls, or a further question.

        A number is drawn in both cases, so that a client's moves do not depend on the order of replies.
        """
        number = self._rng.randint(0, 9)
        self._messages.append(without_id(reply))
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["arguments"]}
            for call in reply.get("tool_calls", ())
        ]
        self._messages += results or [{"role": "user", "content": f"And {number} more?"}]

    def _body(self, messages: Sequence[Any], tools: bool = True) -> dict[str, Any]:
        body = {"model": "policy", "messages": [*messages], "max_tokens": self._max_tokens}
        return body | ({"tools": [ADD]} if tools else {})

    async def _ask(
        self,
        messages: Sequence[Any],
        *,
        headers: Mapping[str, str] | None = None,
        stream: bool = False,
        tools: bool = True,
        **more: Any,
    ) -> dict[str, Any]:
        body = self._body(messages, tools) | more
        create: Any = self._client.chat.completions.create
        if not stream:
            reply = await create(**body, extra_headers=headers)
            self.received.add(reply.id)
            return {"id": reply.id, **reply.choices[0].message.model_dump(exclude_none=True)}
        chunks = [chunk async for chunk in await create(**body, stream=True, extra_headers=headers)]
        self.received.add(chunks[0].id)
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        calls = [call.model_dump(exclude={"index"}) for delta in deltas for call in delta.tool_calls or ()]
        content = "".join(delta.content or "" for delta in deltas)
        return {"id": chunks[0].id, "role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def without_id(reply: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in reply.items() if name != "id"}


class Clients:
    """The custom agent: one `Client` per attempt, by the attempt's name."""

    def __init__(self, engine: LoggingEngine, max_tokens: int, seed: int) -> None:
        self._engine, self._max_tokens, self._seed = engine, max_tokens, seed
        self._http = DefaultAsyncHttpxClient(trust_env=False, limits=httpx.Limits(max_connections=None))
        self.clients: dict[str, Client] = {}

    async def answer(self, task: GivenTask, attempt: Attempt, endpoint: Endpoint) -> str:
        client = AsyncOpenAI(
            base_url=endpoint.base_url, api_key=attempt.key, http_client=self._http, max_retries=0, timeout=3600
        )
        self.clients[task.id] = Client(client, self._engine, task, self._max_tokens, self._seed)
        for _ in range(MOVES_EACH):
            await self.clients[task.id].move()
        return "done"


@dataclass
class Audit:
    """Counts over all attempts that were checked."""

    attempts: int = 0
    calls: int = 0
    branches: int = 0
    sampled: int = 0
    """Tokens that the engine sampled."""
    trained: int = 0
    """Tokens that the loss mask selects."""
    foreign: int = 0
    """Trained tokens that are no entry of the engine's log."""
    repeated: int = 0
    """Tokens that are trained more than once."""
    untrained_replies: int = 0
    """Replies that the agent received and that are in no sample."""
    unreceived_replies: int = 0
    """Replies in a sample that the agent did not receive."""
    unequal_resends: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        faults = (self.foreign, self.repeated, self.untrained_replies, self.unreceived_replies, self.unequal_resends)
        return not self.failures and not any(faults)

    def check(self, log: Sequence[Sampled], samples: Iterable[TrainingSample], *, num_received: int) -> None:
        """Add one attempt."""
        self.attempts += 1
        self.calls += len(log)
        self.sampled += sum(len(entry.token_ids) for entry in log)
        left = Counter(key_of(*entry) for entry in log)
        known, num_trained = set(left), 0
        for sample in samples:
            self.branches += 1
            for start, end in trained_runs(sample):
                num_trained += 1
                ids, logprobs = sample.token_ids.tolist(), sample.rollout_logprobs[start:end].tolist()
                key = key_of(ids[:start], ids[start:end], logprobs)
                self.trained += end - start
                self.foreign += 0 if key in known else end - start
                self.repeated += end - start if key in known and not left[key] else 0
                left[key] -= 1
        self.untrained_replies += max(0, num_received - num_trained)
        self.unreceived_replies += max(0, num_trained - num_received)


def key_of(prompt: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[Any, ...]:
    return tuple(prompt), tuple(token_ids), np.asarray(logprobs, dtype=np.float32).tobytes()


def trained_runs(sample: TrainingSample) -> Iterator[tuple[int, int]]:
    """Yield start and end of each maximal run of trained tokens."""
    for trained, run in groupby(range(len(sample.loss_mask)), key=lambda at: bool(sample.loss_mask[at])):
        if trained:
            places = [*run]
            yield places[0], places[-1] + 1


async def audit(
    engine: Engine, tokenizer: Any, *, num_turns: int, at_once: int = 64, max_tokens: int = 48, seed: int = 0
) -> Audit:
    """Run attempts until the engine was called `num_turns` times; return what the audit found."""
    logging_engine, endpoint, result = LoggingEngine(engine), Endpoint(), Audit()
    clients = Clients(logging_engine, max_tokens, seed)
    agent = CustomAgent(
        clients.answer,
        endpoint,
        writer=engine_writers(logging_engine, TEMPERATURE),
        chat=ChatFormat(tokenizer),
        rules=Rules(
            model="policy",
            temperature=TEMPERATURE,
            override=False,
            max_tokens=max_tokens,
            max_context_tokens=8192,
            max_calls=64,
        ),
        limits=RolloutConfig(episode_timeout_s=7200),
    )
    numbers = iter(range(10**9))

    async def attempts() -> None:
        while sum(map(len, logging_engine.log.values())) < num_turns:
            name = f"attempt-{next(numbers)}"
            task = Task(id=name, dataset="audit", question="What is 17 + 25?", answer="42")
            trajectory = await agent.run(task, trajectory_id=name, group_id="audit")
            samples = samples_of(trajectory, [1.0] * len(trajectory.planner_turns), temperature=TEMPERATURE)
            client = clients.clients[name]
            result.check(logging_engine.log[name], samples, num_received=len(client.received))
            result.unequal_resends += client.unequal_resends
            result.failures += [trajectory.failure] if trajectory.failure else []

    await asyncio.gather(*(attempts() for _ in range(at_once)))
    endpoint.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2000, help="calls of the engine")
    parser.add_argument("--at-once", type=int, default=64, help="attempts in parallel")
    parser.add_argument("--real", action="store_true", help="sample with the demo model instead of a script")
    options = parser.parse_args()
    from transformers import AutoTokenizer

    from configs.learner import ModelConfig
    from configs.rollout import EngineConfig
    from ray_jobs.run.model_folder import ensure_demo_model

    model_path = Path(ensure_demo_model())
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    engine: Any = ScriptedSampler(tokenizer, seed=0)
    if options.real:
        from rollout.engines.vllm import VllmEngine

        engine = VllmEngine(model_path, EngineConfig(max_model_len=4096, max_num_seqs=64), ModelConfig(), seed=0)
    result = asyncio.run(audit(engine, tokenizer, num_turns=options.turns, at_once=options.at_once))
    if options.real:
        engine.close()
    print(json.dumps(vars(result), indent=2))
    raise SystemExit(0 if result.clean else "the audit found a fault")


if __name__ == "__main__":
    main()
