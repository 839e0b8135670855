"""What HTTP adds: the same agent without a server, over HTTP by a bare client, and by the official one.

    python -m benchmarks.endpoint_overhead [--attempts 64] [--calls 10] [--sampling-s 1.0]

The engine is scripted: a call takes half to one and a half times `--sampling-s`, drawn alike for all. What is added to
a call is what its agent waited longer than the engine took. The first calls of all attempts come at once and wait for
each other's processor time; they are told apart. Client and server share one process, as they do for an agent that is a
function; the processor time of a call is that of both, and of rendering and scripting.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from benchmarks.endpoint.attempts import ADD, ScriptedSampler
from benchmarks.endpoint_audit import demo_tokenizer
from rollout.chat import ChatFormat
from rollout.endpoint.attempt import Attempt
from rollout.endpoint.chat_completions import message_of, read
from rollout.endpoint.request import Rules
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import EngineWriter
from rollout.engines.engine import GenerationRequest
from rollout.types import Completion

RULES = Rules(model="policy", temperature=1.0, override=False, max_tokens=48, max_context_tokens=100_000)
Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
Way = Callable[[Endpoint, Attempt, DefaultAsyncHttpxClient], Ask]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`added_ms`: of each call after an attempt's first, `first_ms` of the first ones, in ascending order. `cpu_ms`:
    processor time of a call, on average."""

    calls_per_s: float
    cpu_ms: float
    added_ms: tuple[float, ...]
    first_ms: tuple[float, ...]


def percentile(values: Sequence[float], share: float) -> float:
    """Of values in ascending order."""
    return values[min(len(values) - 1, int(share * len(values)))]


class ScriptedTimes:
    """Says what a sampler says, after a time; `took` is that of an attempt's last call."""

    def __init__(self, sampler: ScriptedSampler, sampling_s: float) -> None:
        self._sampler = sampler
        self._sampling_s = sampling_s
        self._rng = random.Random(0)
        self.took: dict[str, float] = {}

    async def generate(self, request: GenerationRequest) -> Completion:
        started = time.perf_counter()
        await asyncio.sleep(self._sampling_s * self._rng.uniform(0.5, 1.5))
        completion = await self._sampler.generate(request)
        self.took[request.trajectory_id] = time.perf_counter() - started
        return completion

    def release(self, trajectory_id: str) -> None:
        pass


async def dialogue(ask: Ask, num_calls: int, waited: Callable[[float], None]) -> None:
    """One attempt: a dialogue that grows, with a tool on offer."""
    messages: list[Any] = [{"role": "system", "content": "You add."}, {"role": "user", "content": "17 + 25?"}]
    for _ in range(num_calls):
        started = time.perf_counter()
        reply = await ask({"model": "policy", "messages": messages, "tools": [ADD]})
        waited(time.perf_counter() - started)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in reply.get("tool_calls", ())
        ]
        messages = [*messages, reply, *(results or [{"role": "user", "content": "Sure?"}])]


async def measured(tokenizer: Any, way: Way, *, attempts: int, calls: int, sampling_s: float) -> Measured:
    engine = ScriptedTimes(ScriptedSampler(tokenizer, seed=0), sampling_s)
    chat, endpoint, connections = ChatFormat(tokenizer), Endpoint(), DefaultAsyncHttpxClient(trust_env=False)
    added: dict[str, list[float]] = {}

    async def play(number: int) -> None:
        name = str(number)
        attempt = Attempt(EngineWriter(engine, trajectory_id=name, temperature=1.0), chat, RULES)
        await endpoint.admit(attempt)
        ask, own = way(endpoint, attempt, connections), added.setdefault(name, [])
        await dialogue(ask, calls, lambda waited: own.append((waited - engine.took[name]) * 1000))

    await play(-1)
    added.clear()
    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(play(number) for number in range(attempts)))
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    endpoint.close()
    count = attempts * calls
    return Measured(
        calls_per_s=count / wall,
        cpu_ms=1000 * cpu / count,
        added_ms=tuple(sorted(ms for own in added.values() for ms in own[1:])),
        first_ms=tuple(sorted(own[0] for own in added.values())),
    )


def without_http(endpoint: Endpoint, attempt: Attempt, connections: DefaultAsyncHttpxClient) -> Ask:
    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        return message_of(await attempt.call(read(body, attempt)).reply())

    return ask


def by_a_bare_client(endpoint: Endpoint, attempt: Attempt, connections: DefaultAsyncHttpxClient) -> Ask:
    headers = {"Authorization": f"Bearer {attempt.key}"}

    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        answer = await connections.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers)
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message

    return ask


def by_the_official_client(endpoint: Endpoint, attempt: Attempt, connections: DefaultAsyncHttpxClient) -> Ask:
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=attempt.key, http_client=connections)

    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        reply = await client.chat.completions.create(**body)
        return reply.choices[0].message.model_dump(exclude_none=True)

    return ask


WAYS = (without_http, by_a_bare_client, by_the_official_client)


def shown(way: Way, runs: Sequence[Measured], direct: Sequence[Measured]) -> str:
    """Medians over runs; the rate is compared run by run."""
    p50, p95 = (statistics.median(percentile(run.added_ms, share) for run in runs) for share in (0.5, 0.95))
    first = statistics.median(percentile(run.first_ms, 0.95) for run in runs)
    cpu, rate = (statistics.median(getattr(run, name) for run in runs) for name in ("cpu_ms", "calls_per_s"))
    ratio = statistics.median(run.calls_per_s / other.calls_per_s for run, other in zip(runs, direct, strict=True))
    name = way.__name__.replace("_", " ")
    return (
        f"{name}: {p50:.1f} ms at p50 and {p95:.1f} ms at p95 beyond the engine's time ({first:.1f} ms at p95 of first "
        f"calls), {cpu:.1f} ms of processor time a call, {rate:.1f} calls/s ({ratio:.1%} of the rate without HTTP)"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--attempts", type=int, default=64)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--sampling-s", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    tokenizer = demo_tokenizer()
    settings = {"attempts": options.attempts, "calls": options.calls, "sampling_s": options.sampling_s}
    runs: dict[Way, list[Measured]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way in WAYS:
            runs[way].append(asyncio.run(measured(tokenizer, way, **settings)))
    for way in WAYS:
        print(shown(way, runs[way], runs[without_http]))


if __name__ == "__main__":
    main()
