"""Lockstep: every running trajectory's next request is sampled together, in a fixed order.

A continuous batch depends on when each tool happens to finish, and with it the last bits of every logit. In
lockstep the batches are the same from run to run, and each request has a seed of its own, so that a synchronous run
is bit-reproducible, also when it was cut off and resumed. A round begins with an empty prefix cache: how much of a
prompt is cached decides in which shapes the rest is computed, and a resumed run has not seen what came before.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Protocol

from rollout.engine import Engine, GenerationRequest
from rollout.seeded import stream_seed
from rollout.types import Completion


class BatchEngine(Engine, Protocol):
    async def forget_prefixes(self) -> None: ...

    async def generate_together(self, requests: list[GenerationRequest]) -> list[Completion]: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: GenerationRequest
    future: asyncio.Future[Completion]


class LockstepEngine:
    """An `Engine` over another one. A round runs `begin_round(n)` and then exactly n trajectories."""

    def __init__(self, engine: BatchEngine, *, seed: int) -> None:
        self._engine = engine
        self._seed = seed
        self._running = 0
        self._begins = False
        self._waiting: list[_Waiting] = []
        self._batches: set[asyncio.Task[None]] = set()

    def begin_round(self, num_trajectories: int) -> None:
        if self._running:
            raise RuntimeError(f"{self._running} trajectories of the round before are still running")
        self._running = num_trajectories
        self._begins = True

    async def generate(self, request: GenerationRequest) -> Completion:
        """Waits until every running trajectory has asked or ended; the last of them wakes all."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(request, future))
        self._sample_if_complete()
        return await future

    def release(self, trajectory_id: str) -> None:
        self._waiting = [one for one in self._waiting if one.request.trajectory_id != trajectory_id]
        self._running -= 1
        self._sample_if_complete()

    def _sample_if_complete(self) -> None:
        if self._waiting and len(self._waiting) == self._running:
            batch = sorted(self._waiting, key=lambda one: one.request.trajectory_id)
            self._waiting = []
            task = asyncio.get_running_loop().create_task(self._sample(batch, first=self._begins))
            self._begins = False
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    async def _sample(self, batch: list[_Waiting], *, first: bool) -> None:
        try:
            if first:
                await self._engine.forget_prefixes()
            completions = await self._engine.generate_together([self._seeded(one.request) for one in batch])
        except Exception as error:
            for one in batch:
                if not one.future.done():
                    one.future.set_exception(error)
            return
        for one, completion in zip(batch, completions, strict=True):
            if not one.future.done():
                one.future.set_result(completion)

    def _seeded(self, request: GenerationRequest) -> GenerationRequest:
        """A trajectory's prompts grow with every call, so their length numbers its calls."""
        return replace(request, seed=stream_seed(self._seed, request.trajectory_id, len(request.prompt_token_ids)))
