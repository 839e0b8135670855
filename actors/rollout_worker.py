"""The rollout worker as an actor: admitted groups in, scored groups out, always with proven weights."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from configs.run import RunConfig
from envs.datasets.generated import GeneratedTask
from envs.datasets.sampler import TaskSampler
from envs.types import Task
from reward.outcome import OutcomeReward
from rollout.buffer import Permit
from rollout.types import Trajectory
from rollout.worker import Worker


@ray.remote
class RolloutWorkerActor:
    def __init__(self, config: RunConfig, model_path: Path, index: int, buffer: Any, weights: Any) -> None:
        self._config = config
        self._index = index
        self._buffer = buffer
        self._weights = weights
        self._worker = Worker(config, model_path, index=index)
        self._reward = OutcomeReward(config.learner, max_turn_tokens=config.rollout.max_turn_tokens)
        data_path = Path(config.envs.data_path) if config.envs.data_path else None
        self._tasks = TaskSampler(config.envs.mix, seed=config.seed, path=data_path)
        self._version_loaded = asyncio.Condition()

    async def ready(self) -> bool:
        return True

    async def run(self) -> None:
        """Roll out until the buffer is closed, then drop what still runs. Any error ends the run."""
        max_groups = max(1, 2 * self._config.rollout.engine.max_num_seqs // self._config.rollout.group_size)
        places = asyncio.Semaphore(max_groups)
        async with asyncio.TaskGroup() as background:
            tasks = {background.create_task(self._follow_weights())}
            while permits := await self._buffer.admit.remote(max_groups):
                self._worker.begin_round(len(permits))
                groups = {background.create_task(self._run_group(permit, places)) for permit in permits}
                tasks = {task for task in tasks | groups if not task.done()}
                if self._config.pipeline_depth == 0:
                    await asyncio.gather(*groups)
            for task in tasks:
                task.cancel()

    async def sync_weights(self, policy_version: int) -> None:
        """Load the newest version, which must be at least this one."""
        while self._worker.engine.policy_version < policy_version:
            await self._load(await self._weights.wait_newer.remote(self._worker.engine.policy_version))

    async def _follow_weights(self) -> None:
        while True:
            await self._load(await self._weights.wait_newer.remote(self._worker.engine.policy_version))

    async def _load(self, published: Any) -> None:
        """Load an adapter and prove to the store which bytes were loaded."""
        adapter = await published.ref[0]
        digest = await self._worker.engine.load_adapter(published.policy_version, adapter.data)
        await self._weights.acknowledge.remote(self._index, published.policy_version, digest)
        async with self._version_loaded:
            self._version_loaded.notify_all()

    async def evaluate(self, tasks: Sequence[Task], phase: str) -> list[Trajectory]:
        return await self._worker.evaluate(tasks, phase)

    async def demonstrate(self, tasks: Sequence[GeneratedTask], wrong_share: float) -> list[Trajectory]:
        return await self._worker.demonstrate(tasks, wrong_share)

    async def close(self) -> None:
        self._worker.close()

    async def _run_group(self, permit: Permit, places: asyncio.Semaphore) -> None:
        async with places:
            async with self._version_loaded:
                await self._version_loaded.wait_for(
                    lambda: self._worker.engine.policy_version >= permit.min_policy_version
                )
            group = await self._worker.run_group(self._tasks.task(permit.ordinal), permit.ordinal)
            await self._buffer.complete.remote(permit.ordinal, self._reward.score_group(group))
