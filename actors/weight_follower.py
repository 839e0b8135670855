"""A worker's end of the store: load what is published, prove it, let rollouts wait for it."""

import asyncio
from typing import TYPE_CHECKING

import ray

from rollout.engines.engine import PolicyEngine
from rollout.store.adapters import PublishedAdapter
from rollout.store.canary import Reading

if TYPE_CHECKING:
    from actors.handles import StoreHandle


class WeightFollower:
    def __init__(self, engine: PolicyEngine, store: "StoreHandle", worker: int) -> None:
        self._engine = engine
        self._store = store
        self._worker = worker
        self._loading = asyncio.Lock()
        self._base: Reading | None = None
        self._moved: Reading | None = None
        self._proof = asyncio.Event()
        self.proven_version = engine.policy_version

    async def follow(self) -> None:
        """Load every version that is published, for ever."""
        while True:
            await self._load_newer_than(self.proven_version)

    async def reached(self, policy_version: int) -> None:
        """Waits for this version or a newer one, which `follow` loads; woken by its proof."""
        while self.proven_version < policy_version:
            await self._proof.wait()

    async def sync(self, policy_version: int) -> None:
        """Load the newest version, which must be at least this one."""
        while self.proven_version < policy_version:
            await self._load_newer_than(policy_version - 1)

    async def _load_newer_than(self, policy_version: int) -> None:
        """Load an adapter and prove it to the store: the bytes by their digest, the weights by what the engine's memory
        holds and by the canary text."""
        offer = await self._store.wait_newer.remote(policy_version)
        published = offer.published
        try:
            data = await offer.ref[0]
        except ray.exceptions.ObjectLostError:
            # The store died after it answered; it has the bytes on disk and will offer them again.
            return
        # What was begun is finished: a version that is loaded and not proven could neither be used nor loaded again.
        await asyncio.shield(self._take_up(published, data))

    async def _take_up(self, published: PublishedAdapter, data: bytes) -> None:
        async with self._loading:
            if published.policy_version <= self.proven_version:
                return
            if self._base is None:
                self._base = self._moved = await self._reading(self._engine.policy_version, published)
            prepared = await self._engine.prepare_adapter(published.policy_version, data)
            digest, said, read_back = await asyncio.gather(
                self._engine.load_prepared(prepared),
                self._reading(published.policy_version, published),
                self._engine.read_back(),
            )
            before = [one for one in (self._base, self._moved) if one is not None]
            if await self._store.acknowledge.remote(self._worker, said, digest, read_back, before):
                self._moved = said
            self.proven_version = published.policy_version
            self._proof.set()
            self._proof = asyncio.Event()

    async def _reading(self, policy_version: int, published: PublishedAdapter) -> Reading:
        logprobs = await self._engine.score(published.canary.token_ids) if published.canary else []
        return Reading(policy_version=policy_version, logprobs=logprobs)
