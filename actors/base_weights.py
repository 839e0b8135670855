"""The holder of the base weights as an actor: as long as it lives, others read them."""

import asyncio
from collections.abc import Callable

import ray

from rollout.engines.base_weights import BaseWeights, ExportedBase


@ray.remote
class BaseWeightsActor:
    """It computes nothing, so that what happens to those that read the weights does not happen to the weights. Nobody
    starts it again: who reads them would go on with memory that is no longer looked after."""

    def __init__(self, build: Callable[[], BaseWeights]) -> None:
        self._weights = build()

    def __repr__(self) -> str:
        return "BaseWeights"

    async def export(self) -> ExportedBase:
        """For one process, which reads them once."""
        return self._weights.export()

    async def until_lost(self) -> None:
        """Never returns; fails when this process ends."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        self._weights.close()
