"""The process that holds the base weights which the learner and the first rollout worker share on one card."""

from collections.abc import Callable

import ray

from actors.heartbeat import Watched
from rollout.engines.base_weights import BaseWeights, ExportedBase


@ray.remote
class BaseWeightsActor(Watched):
    """Only holds the base weights, so it survives crashes of its readers.

    It is never restarted: the readers would keep pointers to freed memory.
    """

    def __init__(self, build: Callable[[], BaseWeights]) -> None:
        self._weights = build()

    def __repr__(self) -> str:
        return "BaseWeights"

    async def export(self) -> ExportedBase:
        """Return handles with which one other process reads the weights."""
        return self._weights.export()

    async def close(self) -> None:
        self._weights.close()
