"""The buffer as an actor: scored groups in the object store, their counts and statistics beside them."""

from dataclasses import dataclass
from typing import Any

import ray

from configs.run import RunConfig
from reward.statistics import RolloutStatistics, group_statistics
from reward.types import ScoredGroup
from rollout.buffer import GroupBuffer, GroupCounts, Permit


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRefs:
    """A cut batch: references to its scored groups, and what was rolled out since the batch before."""

    groups: tuple[Any, ...]
    statistics: RolloutStatistics
    counts: GroupCounts


@ray.remote(num_cpus=0)
class BufferActor:
    def __init__(self, config: RunConfig) -> None:
        self._buffer: GroupBuffer[Any] = GroupBuffer(
            batch_groups=config.batch_groups,
            pipeline_depth=config.pipeline_depth,
            max_empty_batches=config.max_empty_batches,
        )
        self._statistics = RolloutStatistics()
        self._total = RolloutStatistics()

    async def admit(self, max_groups: int) -> list[Permit]:
        return await self._buffer.admit(max_groups)

    async def complete(self, ordinal: int, scored: ScoredGroup) -> None:
        statistics = group_statistics(scored)
        self._statistics += statistics
        self._total += statistics
        # This actor puts the group itself: Ray loses objects whose owner died, and workers may die.
        await self._buffer.complete(ordinal, ray.put(scored), scored.outcomes)

    async def next_batch(self) -> BatchRefs:
        groups = tuple(await self._buffer.next_batch())
        statistics, self._statistics = self._statistics, RolloutStatistics()
        return BatchRefs(groups=groups, statistics=statistics, counts=self._buffer.counts)

    async def mark_trained(self, policy_version: int) -> None:
        await self._buffer.mark_trained(policy_version)

    async def totals(self) -> tuple[GroupCounts, RolloutStatistics]:
        return self._buffer.counts, self._total

    async def close(self) -> None:
        await self._buffer.close()
