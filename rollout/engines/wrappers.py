"""Engines that wrap another engine (seeded, replaying, in lockstep, frozen), and one that plays plans."""

import asyncio
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from envs.datasets.families import PlanStep
from envs.datasets.generated import GeneratedTask, Plan
from rollout.agent.planner import Decision
from rollout.chat import Chat, ChatFormat
from rollout.endpoint.messages import RequestError
from rollout.engines.engine import Engine, EngineError, GenerationRequest
from rollout.types import Completion, Turn, packed_ids

if TYPE_CHECKING:
    from rollout.engines.vllm import VllmEngine


def stream_seed(*names: object) -> int:
    """Return a seed below 2**32 for the random stream of these names. Sums of seeds would repeat streams."""
    return zlib.crc32("|".join(map(str, names)).encode())


class SeededEngine:
    """An `Engine` for one trajectory that gives each call a different, reproducible seed."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._seed = seed
        self._num_calls = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        self._num_calls += 1
        seed = stream_seed(self._seed, request.trajectory_id, self._num_calls)
        return await self._engine.generate(replace(request, seed=seed))

    def release(self, trajectory_id: str) -> None:
        self._engine.release(trajectory_id)


class ReplayEngine:
    """An `Engine` for one trajectory that repeats the first replies of a recorded attempt, and samples the rest.

    A call is recognised by its prompt and its grammar, because parallel calls come in any order. Until all are
    repeated, an agent that makes a call that was not recorded gets no reply.
    """

    def __init__(self, engine: Engine, turns: Sequence[Turn], num_turns: int) -> None:
        """Repeat the first `num_turns` of the attempt's `turns`."""
        self._engine = engine
        self._repeated, self._followed = list(turns[:num_turns]), turns[num_turns:]

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return the recorded reply or a sampled one. Raises RequestError for a call that was not recorded."""
        key = packed_ids(request.prompt_token_ids), request.grammar
        if request.use_adapter:
            for turn in self._repeated:
                if (turn.prompt, turn.grammar) == key:
                    self._repeated.remove(turn)
                    return turn.completion
            if self._repeated and key not in [(turn.prompt, turn.grammar) for turn in self._followed]:
                # With status 422 clients do not retry.
                raise RequestError(
                    "the agent does not repeat the recorded attempt; its calls must depend only on task and replies",
                    status=422,
                    code="not_repeated",
                )
        return await self._engine.generate(request)

    def release(self, trajectory_id: str) -> None:
        self._engine.release(trajectory_id)


class LockstepEngine:
    """An `Engine` that samples one turn of all trajectories together, so that batches do not depend on timing.

    A round is `begin_round(n)` followed by exactly n trajectories.
    """

    def __init__(self, engine: "VllmEngine", *, seed: int) -> None:
        self._engine = engine
        self._seed = seed
        self._running = 0
        self._is_first = False
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []
        self._batches: set[asyncio.Task[None]] = set()

    def begin_round(self, num_trajectories: int) -> None:
        if self._running:
            raise RuntimeError(f"{self._running} trajectories of the previous round are still running")
        self._running = num_trajectories
        self._is_first = True

    async def generate(self, request: GenerationRequest) -> Completion:
        """Wait until every running trajectory has called or ended, then sample all calls together."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._sample_if_complete()
        return await future

    def release(self, trajectory_id: str) -> None:
        self._waiting = [one for one in self._waiting if one[0].trajectory_id != trajectory_id]
        self._engine.release(trajectory_id)
        self._running -= 1
        self._sample_if_complete()

    def _sample_if_complete(self) -> None:
        if self._waiting and len(self._waiting) == self._running:
            batch = sorted(self._waiting, key=lambda one: one[0].trajectory_id)
            self._waiting = []
            task = asyncio.get_running_loop().create_task(self._sample(batch, first=self._is_first))
            self._is_first = False
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    async def _sample(
        self, batch: Sequence[tuple[GenerationRequest, asyncio.Future[Completion]]], *, first: bool
    ) -> None:
        # A trajectory's prompts grow with every call, so their length numbers its calls.
        requests = [
            replace(one, seed=stream_seed(self._seed, one.trajectory_id, len(one.prompt_token_ids))) for one, _ in batch
        ]
        try:
            if first:
                await self._engine.forget_prefixes()
            completions = await self._engine.generate_together(requests)
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), completion in zip(batch, completions, strict=True):
            if not future.done():
                future.set_result(completion)


SYSTEM = "Answer the question in a few sentences."


def frozen_model(engine: Engine, chat: Chat, max_tokens: int) -> Callable[[str], Awaitable[str]]:
    """Return a function that lets the frozen base model answer a question greedily. It raises EngineError."""
    numbers = count()

    async def ask(prompt: str) -> str:
        trajectory_id = f"base_generator/{next(numbers)}"
        request = GenerationRequest(
            trajectory_id=trajectory_id,
            prompt_token_ids=chat.prompt(SYSTEM, prompt),
            max_tokens=max_tokens,
            temperature=0.0,
            use_adapter=False,
        )
        try:
            return (await engine.generate(request)).text
        finally:
            engine.release(trajectory_id)

    return ask


# It begins like no step of a plan: what RL takes from its first tokens, it would also take from theirs.
GIVES_UP = PlanStep(thought="Too much work.", action="answer", action_input="unknown")


def demonstrated_plans(tasks: Sequence[GeneratedTask], lazy_share: float) -> list[Plan]:
    """Return each task's plan, for a share of each family one that gives up: after the first call or a later one.

    They are spread evenly over the tasks, because a policy imitates the last ones best. A plan of one call gives up
    before it.
    """
    num_tasks: Counter[str] = Counter()

    def demonstrated(one: GeneratedTask) -> Plan:
        number = num_tasks[one.task.dataset]
        num_tasks[one.task.dataset] += 1
        num_lazy = int(lazy_share * number)
        if num_lazy == int(lazy_share * (number + 1)):
            return one.plan
        last = len(one.plan) - 2
        return (*one.plan[: min(1 + num_lazy % max(last, 1), last)], GIVES_UP)

    return [demonstrated(one) for one in tasks]


class DemonstrationEngine:
    """An `Engine` for one trajectory that writes a plan's decisions, one per call."""

    def __init__(self, chat: ChatFormat, plan: Sequence[PlanStep]) -> None:
        self._chat = chat
        self._steps = iter(plan)

    async def generate(self, request: GenerationRequest) -> Completion:
        step = next(self._steps, None)
        if step is None:
            raise EngineError("the plan has no further step")
        text = Decision(thought=step.thought, action=step.action, action_input=step.action_input).to_json()
        ids = self._chat.encode_completion(text)
        return Completion(token_ids=ids, logprobs=(0.0,) * len(ids), text=text, finish_reason="stop", policy_version=0)

    def release(self, trajectory_id: str) -> None:
        pass
