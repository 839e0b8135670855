"""A worker's end of the weight store: load what is published, prove it, let rollouts wait for it."""

import asyncio
from typing import Any

from rollout.engine import Engine


class WeightFollower:
    def __init__(self, engine: Engine, weights: Any, worker: int) -> None:
        self._engine = engine
        self._weights = weights
        self._worker = worker
        self._loaded = asyncio.Condition()

    async def follow(self) -> None:
        """Load every version that is published, for ever."""
        while True:
            await self._load_newer()

    async def sync(self, policy_version: int) -> None:
        """Load the newest version, which must be at least this one."""
        while self._engine.policy_version < policy_version:
            await self._load_newer()

    async def wait_for(self, policy_version: int) -> None:
        """Wait until the engine samples with at least this version; woken by every load."""
        async with self._loaded:
            await self._loaded.wait_for(lambda: self._engine.policy_version >= policy_version)

    async def _load_newer(self) -> None:
        """Load an adapter and prove to the store which bytes were loaded."""
        published = await self._weights.wait_newer.remote(self._engine.policy_version)
        adapter = await published.ref[0]
        digest = await self._engine.load_adapter(published.policy_version, adapter.data)
        await self._weights.acknowledge.remote(self._worker, published.policy_version, digest)
        async with self._loaded:
            self._loaded.notify_all()
