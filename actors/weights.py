"""The weight store: adapters by version, acknowledged by every worker that samples with them."""

import asyncio
from dataclasses import dataclass
from typing import Any

import ray

from learner.types import Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedAdapter:
    """`ref` holds the adapter in the object store; it is wrapped so that Ray passes it on unresolved."""

    policy_version: int
    digest: str
    ref: tuple[Any]


class AdapterMismatchError(RuntimeError):
    """A worker loaded other bytes than the learner published. Nothing sampled after that can be trusted."""


@ray.remote(num_cpus=0)
class WeightStore:
    """Puts adapters into the object store itself: Ray loses objects whose owner died, and this one stays."""

    def __init__(self) -> None:
        self._published: list[PublishedAdapter] = []
        self._acknowledged: dict[int, set[int]] = {}
        self._changed = asyncio.Condition()

    async def publish(self, adapter: Adapter) -> None:
        """Make a version available. Raises ValueError when the number is not new: numbers are never reused."""
        async with self._changed:
            if self._published and adapter.policy_version <= self._published[-1].policy_version:
                raise ValueError(f"version {adapter.policy_version} was published before")
            # Only the newest bytes are kept referenced; the run folder has the checkpoints.
            self._published = [
                PublishedAdapter(policy_version=old.policy_version, digest=old.digest, ref=(None,))
                for old in self._published
            ]
            self._published.append(
                PublishedAdapter(policy_version=adapter.policy_version, digest=adapter.digest, ref=(ray.put(adapter),))
            )
            self._changed.notify_all()

    async def wait_newer(self, policy_version: int) -> PublishedAdapter:
        """The newest adapter above `policy_version`. Waits; woken by `publish`."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: bool(self._published) and self._published[-1].policy_version > policy_version
            )
            return self._published[-1]

    async def acknowledge(self, worker: int, policy_version: int, digest: str) -> None:
        """A worker samples with this version from now on; `digest` is of the bytes it loaded."""
        expected = {one.policy_version: one.digest for one in self._published}.get(policy_version)
        if digest != expected:
            raise AdapterMismatchError(
                f"worker {worker} loaded {digest[:12]} as version {policy_version}, published was {expected}"
            )
        self._acknowledged.setdefault(policy_version, set()).add(worker)

    async def counts(self) -> tuple[int, int]:
        """(versions published, versions that some worker acknowledged)."""
        return len(self._published), len(self._acknowledged)
