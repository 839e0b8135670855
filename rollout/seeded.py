"""Sampling whose random numbers depend on a seed and on what is asked, never on what runs beside it."""

import zlib
from dataclasses import replace

from rollout.engine import Engine, GenerationRequest
from rollout.types import Completion


def stream_seed(*names: object) -> int:
    """The seed, below 2**32, of the random stream that belongs to these names. A sum of a run's seed and a number would
    give the next run's streams to this one."""
    return zlib.crc32("|".join(map(str, names)).encode())


def engine_seed(seed: int, worker: int) -> int:
    """Of the engine of one rollout worker in a run with this seed."""
    return stream_seed(seed, "engine", worker)


class SeededEngine:
    """An `Engine` over another one, for one trajectory: each of its calls has a seed of its own."""

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
