"""The dynamic-sampling filter as an actor: it holds the buffer of groups and the newest adapter.

It owns encoded groups and adapters in Ray's object store, so that workers and learners may die.
"""

import asyncio
from collections.abc import Sequence

import ray

from actors.heartbeat import Watched
from configs.api_keys import redact_output
from configs.errors import UserError
from configs.run import RunConfig
from envs.datasets.sampler import FixedShares
from learner.types import Adapter
from rollout.buffer import GroupBuffer, Permits
from rollout.engines.read_back import ReadBack
from rollout.lifecycle import Batch, Snapshot, Totals
from rollout.types import GroupSummary

PATIENCE_S = 5.0
"""A worker without work asks again after so long."""
MAX_REQUESTS_PER_S = 50.0
"""More than 250 workers ask again less often, so that waiting costs the same for any number of them."""
MAX_OPEN_CALLS = 100_000
"""Each worker has up to two waiting calls, for work and for weights; the calls that wake them need a slot as well.
Each of Ray's `concurrency_groups` has its own event loop, so that calls in one could not wake those in another."""

Offer = tuple[int, "tuple[ray.ObjectRef[bytes]]"]
"""A policy version, and the reference to its weights in a tuple, so that Ray passes it on unresolved."""


@ray.remote(num_cpus=0, max_concurrency=MAX_OPEN_CALLS)  # type: ignore[call-overload]  # Ray's stubs lack it
class DynamicSampling(Watched):
    def __init__(self, config: RunConfig) -> None:
        redact_output()
        shares = FixedShares(config.envs.mix, seed=config.seed)
        self._buffer = GroupBuffer(config, family_of=shares.name, put=ray.put)
        self._newest: Offer | None = None
        self._last_version = -1
        """Highest version number that was given to a learner or that a learner began to publish."""
        self._newer = asyncio.Event()
        self._digests: dict[int, str] = {}

    # --- groups ----------------------------------------------------------------------------------

    async def admit(self, worker: int, policy_version: int, places: int) -> Permits | None:
        """Return permits for groups that the worker may run, None when there is no more work. Waits for capacity."""
        patience_s = max(PATIENCE_S, len(self._buffer.proven) / MAX_REQUESTS_PER_S)
        return await self._buffer.admit(worker, policy_version, places, patience_s=patience_s)

    async def complete(self, results: Sequence[tuple[int, bytes, GroupSummary]]) -> None:
        """Take in finished groups: lease, encoded group and facts of each."""
        for lease, payload, summary in results:
            self._buffer.complete(lease, payload, summary)

    async def release(self, worker: int, reason: str) -> int:
        """Queue the groups of a worker that is gone again; returns their number."""
        return self._buffer.release(worker, reason)

    async def next_batch(self, step: int) -> Batch | None:
        """Return the batch of a train step as references; None when no tasks are left. Waits until it is full."""
        return await self._buffer.next_batch(step)

    async def mark_trained(self, step: int, policy_version: int, *, refused: str | None = None) -> None:
        """End the step's batch as trained, or as refused for this reason."""
        self._buffer.mark_trained(step, policy_version, refused=refused)

    async def snapshot(self) -> Snapshot:
        """Return the state after the last train step, for a checkpoint."""
        return self._buffer.snapshot

    async def restore(self, snapshot: Snapshot, step: int, policy_version: int) -> None:
        """Continue after the train step of a checkpoint; groups in flight are dropped."""
        self._buffer.restore(snapshot, step=step, policy_version=policy_version)

    async def totals(self) -> Totals:
        return self._buffer.totals()

    async def close(self) -> None:
        """End the calls of all workers that wait for work."""
        self._buffer.close()

    # --- adapters --------------------------------------------------------------------------------

    async def next_version(self) -> int:
        """Return a version number that no learner uses, also if one that was replaced still publishes."""
        self._last_version += 1
        return self._last_version

    async def publish(self, adapter: Adapter) -> None:
        """Make a version available to workers. Raises ValueError where its number is not new."""
        version = adapter.policy_version
        self._last_version = max(self._last_version, version)
        # In a thread: hundreds of megabytes take a while, in which groups come and go.
        ref = await asyncio.to_thread(ray.put, adapter.data)
        if self._newest and version <= self._newest[0]:
            raise ValueError(f"version {version} was published before; the newest is {self._newest[0]}")
        self._digests[version], self._newest = adapter.digest, (version, (ref,))
        self._newer.set()
        self._newer = asyncio.Event()

    async def wait_newer(self, policy_version: int) -> Offer:
        """Return the newest adapter above `policy_version`. Waits for one, woken by `publish`."""
        while self._newest is None or self._newest[0] <= policy_version:
            await self._newer.wait()
        return self._newest

    async def acknowledge(self, worker: int, policy_version: int, digest: str, read_back: ReadBack) -> None:
        """Check the proof of a version: the bytes' digest, and what the engine holds. Raise UserError if wrong.

        The error reaches the worker, which ends and is replaced.
        """
        published = self._digests[policy_version]
        if digest != published:
            raise UserError(
                f"worker {worker} loaded {digest[:12]} as version {policy_version}, published was {published[:12]}"
            )
        if read_back.fault:
            raise UserError(f"worker {worker}, version {policy_version}: {read_back.fault}")
        self._buffer.prove(worker, policy_version)
