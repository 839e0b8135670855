"""Sampling whose random numbers depend on a seed and on what is asked, never on what runs beside it."""

import zlib
from dataclasses import replace

from rollout.engine import Engine, GenerationRequest
from rollout.types import Completion


class SeededEngine:
    """An `Engine` over another one, for one trajectory: each of its calls has a seed of its own."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._seed = seed
        self._num_calls = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        self._num_calls += 1
        call = f"{self._seed}|{request.trajectory_id}|{self._num_calls}"
        return await self._engine.generate(replace(request, seed=zlib.crc32(call.encode())))

    def release(self, trajectory_id: str) -> None:
        self._engine.release(trajectory_id)
